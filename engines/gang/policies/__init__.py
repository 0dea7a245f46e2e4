"""Who goes first, and on how many ranks: policies of a gang's scheduler, one file each, and what they go by.

The scheduler is the mechanism: it keeps jobs, their states' places and their steps, and makes plans. Before a plan it
asks its policy for the order of the jobs and for their teams. A policy is told what is known of each job
(``candidate``), above all what its steps are predicted to take (``gang.eta``), and what was planned; it knows
no Ray, no clock and no result of a step. So the same jobs in the same order get the same plans, in a gang that was
rebuilt and in a simulation (``benchmarks.policies``), which drives the same objects.

Times are predicted seconds. Those of different teams are compared as *gang-seconds*: a step of t seconds on w of N
ranks is t × w / N of them, which is t where all ranks work on one job.
"""
