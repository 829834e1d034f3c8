"""
Which models share which devices, with which batch and share of the compute: seven policies over one problem.

`problem` has the problem and the answer, `profiles` the measured batches, `igniter`, `usher`, `programmes` and
`interference_aware` the policies, `compute` chooses one of them, and `size` asks for the fewest or cheapest devices.

Source of the policies and their names: P. Elvinger, "Towards resource and interference-aware scheduling of ML
workloads", ETH Zurich, 2024, which compares iGniter (Xu et al., TPDS 2022) and Usher (Shubha et al., OSDI 2024) with
integer programmes.
"""
