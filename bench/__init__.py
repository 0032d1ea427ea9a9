"""How fast: compile time, step time and host cost, each beside its contenders."""
