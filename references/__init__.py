"""What is right: attention semantics in float64. Imports cases and torch only, never a backend or anything one uses."""
