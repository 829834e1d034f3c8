"""
The planner: plans of which copies there should be (`PlanVersion`) are made, checked, kept and told to the engine here.

It decides nothing about a call: the engine and the policy's executor bring the cluster to the plan in force.
"""
