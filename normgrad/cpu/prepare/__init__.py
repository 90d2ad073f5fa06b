"""Host side: turn a checked problem into descriptors, workspace and launches. Nothing here imports Numba."""
