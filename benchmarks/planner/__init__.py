"""The planner over whole runs: time to dense's loss, and a link that falls."""
