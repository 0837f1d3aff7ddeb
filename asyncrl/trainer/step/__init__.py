"""The training step: from the plan of a rank to its updates, over any backend."""
