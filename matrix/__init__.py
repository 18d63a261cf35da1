"""What came out: evidence, statuses, rendering, command line, pytest plugin. Imports all other packages."""
