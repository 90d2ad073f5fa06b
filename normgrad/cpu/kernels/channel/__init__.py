"""What GroupNorm and BatchNorm share: samples x channels x positions, with coefficients per channel."""
