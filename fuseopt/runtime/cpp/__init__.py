"""How a C++ kernel is built, and the table that it reads."""
