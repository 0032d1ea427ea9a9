"""How a Triton kernel is built and launched, and the tables that it reads."""
