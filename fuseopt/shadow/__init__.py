"""Replace an optimizer while its step is traced, and write the results back."""
