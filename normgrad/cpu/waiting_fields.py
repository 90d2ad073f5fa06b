"""What lies where in a helper thread's box, by which it is given jobs."""

STATE, FUNCTION, DESCRIPTOR = range(3)  # whether there is a job; a kernel's address, and its descriptor's
BOX_SIZE = 3

IDLE, POSTED = 0, 1  # a job stays posted until it is done
