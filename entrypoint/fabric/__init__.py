"""The host's network libraries in the container: found below the host's root, checked, and put before NCCL.

root -> devices x libraries -> closure -> gate -> FabricPlan -> staged links, or options for an engine
"""
