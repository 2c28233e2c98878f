"""What survives the controller process: the journal of a run."""
