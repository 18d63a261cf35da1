"""What is tried: frozen descriptions of attention batches. Imports nothing else of this project."""
