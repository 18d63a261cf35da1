"""Planted faults: changes of semantics injected into a working row.

Each serves three ends: a faulty backend the harness must catch (kill score), and the hypotheses a failing cell is diagnosed with;
negative controls at the boundary of real rows are in ``harness/controls.py``.
"""
