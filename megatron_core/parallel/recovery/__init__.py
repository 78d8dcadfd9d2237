"""Recovery without a restart: supervisors of training processes, their meeting after a failure, aborted waits."""
