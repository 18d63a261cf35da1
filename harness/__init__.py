"""How a case is driven and judged. Imports cases and references."""
