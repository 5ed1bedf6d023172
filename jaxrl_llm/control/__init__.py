"""What closes the loop: which prompts and rollouts to train on, how to sample, what to replay, when to reset."""
