"""How fast the operators are: against the memory's speed and against other libraries, every result verified first."""
