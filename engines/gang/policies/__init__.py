"""Policies of a gang's scheduler, one per file: the order of jobs, and their teams.

The scheduler is the mechanism: it holds jobs, their states' ranks and their steps, and makes plans. Before a plan it
asks its policy for the order of the jobs and for their teams. A policy's input is ``Candidate`` (mainly predicted step
times, see ``gang.eta``) and the planned steps. It has no Ray, no clock and no results. So the same jobs in the same
order get the same plans, in a rebuilt gang and in a simulation (``benchmarks.policies``).

Times are predicted seconds. Times of different teams are compared as *gang-seconds*: a step of t seconds on w of N
ranks counts as t × w / N. The sum is t if all ranks work on one job.
"""
