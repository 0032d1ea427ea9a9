"""What stands for an optimizer while its step is traced, and what it writes back."""
