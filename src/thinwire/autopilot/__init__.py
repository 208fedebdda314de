"""The planner while training: measure, plan, change over, watch. Between steps, never inside backward."""
