"""How the small shipped models were trained, and how they are judged.

`shapes` has what can be drawn and what is held out (`scenes`), draws it (`draw`), names it plainly (`captions`) or in
free wording (`wording`, which keeps some templates for evaluation), makes tokenizers of the captions (`tokens`) and
asks what they say (`reading`). `vae`, `flux_shapes` and `wan_shapes` are the trainers, `flux_shapes.few_steps` that of
an adapter for few steps; `loop`, `fast`, `optimizers` and `options` are what they share. `evaluate` scores held-out
prompts by `judge`, `seeds` compares seeds, `pictures` draws for the report. Commands, times and scores:
`benchmarks/reports/shipped-models_*.md` and `few-steps_*.md`.
"""
