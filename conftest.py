"""Loads the plugin that collects the cells."""

pytest_plugins = ["attnmatrix.matrix.pytest_plugin"]
