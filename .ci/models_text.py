"""The words around the tables of models."""

from __future__ import annotations

HEAD = """# Models

For operators: which models are served, how are they divided, and what is proved of each?

A pipeline is served if diffusers has *modular blocks* for it and they have one denoising loop, which may be over chunks
of a clip that are denoised one after the other (Helios). Both tables are written by
`PYTHONPATH=. python .ci/models_document.py` from what diffusers, the files in `pipelines/models/` and the published
configurations say.

**Licences differ from model to model, and between sizes of one model.** The names here are those on the models' pages;
many forbid commercial use, or ask for more from a certain revenue on. Read the one on the model's page before you serve
it. *see its page*: none is written here, for no source of its name was at hand.

## Pipelines

- *From what to what* is what requests may ask for, as the models' defaults say (— : no model of it is here to ask).
  *Declared beyond* are workflows of diffusers' blocks that are not served: no request brings what they want, such as a
  clip, an action or a ControlNet's picture.
- *Strategies* divide a step over the ranks of a gang. "one rank" serves one picture at a time on one GPU; more gangs
  serve more at once (`num_replicas`). "by diffusers' plan": diffusers says how, no file here. "not captured": on ranks
  that divide the weights no step is a CUDA graph, and each makes again what others make once a job; the log says so.
- *Once a job* is what no step makes again.
- *Models* are those of this very pipeline that `troupe estimate` knows by name.
- *Proved by* are the tests that build this very pipeline and compare it with diffusers' own call, with small random
  weights; in brackets on how many ranks those of the file do: of CPUs, with Gloo, unless it says GPU. Without one,
  nobody has tried it here.

"""
PUBLISHED_HEAD = """
## Published models

Their configurations come with the project: `troupe estimate --model NAME` says what a step of each takes, and needs
neither weights nor a hub. Memory is that of the transformers' weights on each rank, in GiB and bfloat16. *Whole* is
what a rank has alone, and on any number of ranks that divide the tokens (`ulysses`, `ring`, `allgather_kv`, `hybrid`)
or the branches (`guidance`); `tensor` and `pipeline` divide the weights, here over 2 and 4 ranks (— : the plan does
not). Activations, the encoders and the auto-encoder come on top. Both transformers of a model that has two are counted.
*Timed* are the newest reports of measurements on H100s and H200s that have a transformer of this size, with random
weights (— : none has). *Seen on a GPU*: the date of the last sweep (`python -m benchmarks.sweep`, results in
`benchmarks/reports/sweep.jsonl`) in which the model ran at full size, milliseconds a step there, or why it did not;
"not yet" of a model that no sweep has had its turn with. For models on "one rank" alone (Stable
Diffusion XL, Ideogram 4) the estimate says parameters and memory, and no time: a step is not known before there is a
request.

"""
MARKS = ("<!-- models: .ci/models_document.py -->", "<!-- end of models -->")
"""Around the table in README.md."""
UNCAPTURED = " (not captured)"
"""After `tensor`, the last of the strategies."""
FAMILIES = {
    "flux": "FLUX.1 dev, schnell, Kontext",
    "flux2": "FLUX.2 dev, klein",
    "flux3": "FLUX.3 klein",
    "qwen": "Qwen-Image, -Edit, -Layered, 2.1",
    "z_image": "Z-Image, Z-Image-Turbo",
    "krea2": "Krea 2",
    "ernie_image": "ERNIE-Image",
    "sd3": "Stable Diffusion 3, 3.5",
    "wan": "Wan 2.1, 2.2",
    "hunyuan_video": "HunyuanVideo 1.5",
    "ltx": "LTX-Video",
    "ltx2": "LTX-2",
    "cosmos": "Cosmos 3",
    "minimax_h3": "MiniMax-H3",
    "helios": "Helios",
}
"""What people call the models of a family; its key is the family's in `pipelines/models/`."""
OTHERS = {
    "StableDiffusionXL": "Stable Diffusion XL",
    "Ideogram4": "Ideogram 4",
    "Anima": "Anima",
    "WanAnimate2": "Wan Animate 2",
}
"""The same of pipelines whose transformers have no file there; its key is how their names begin."""
NOT_TRIED = "not tried: no model of it is here"
"""For pipelines of which nothing can be asked here."""
