"""Recovery without a restart: supervisors of training processes, their rendezvous after a failure, aborted waits."""
