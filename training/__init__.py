"""How the small shipped models were trained, and how they are judged.

`scenes` says what can be drawn and what is held out; `draw` draws it, `captions` names it, `tokens` makes tokenizers of
the captions, `reading` asks what they say. `vae`, `flux_shapes` and `wan_shapes` are the trainers; `loop`, `fast`,
`optimizers` and `options` are what they share. `evaluate` scores held-out prompts by `judge`, `seeds` compares seeds,
`pictures` draws for the report. Commands, times and scores: `benchmarks/reports/shipped-models_*.md`.
"""
