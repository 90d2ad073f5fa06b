"""What lies where in a helper thread's box, by which it is given jobs."""

STATE, FUNCTION, DESCRIPTOR = range(3)  # whether there is a job; a kernel's address, and its descriptor's
BOX_SIZE = 3

IDLE, POSTED = 0, 1  # a job stays posted until it is done

# A job that threads of PyTorch's share: a kernel's address and its descriptor's, a status other than 0 that one of the
# threads got, and how many threads have entered it.
JOB_FUNCTION, JOB_DESCRIPTOR, JOB_STATUS, ENTERED = range(4)
