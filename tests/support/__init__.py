"""What the tests share: arrays in odd places, valid calls of every operator, and ways to break them."""
