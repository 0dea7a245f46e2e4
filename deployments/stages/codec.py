"""Serve deployment: a text encoder and a decoder in one process."""

from __future__ import annotations

from deployments.stages.common import StageSpec
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder


class Codec(PromptEncoder, VaeDecoder):
    """Saves a process for small models on a CPU, where it costs more memory and start time than the weights."""

    def __init__(self, spec: StageSpec) -> None:
        PromptEncoder.__init__(self, spec)
        VaeDecoder.__init__(self, spec)
