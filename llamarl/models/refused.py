"""Names of unsupported models, their unsupported features, and the nearest published model that works. No torch."""

from __future__ import annotations

_LLAMA, _QWEN, _MISTRAL = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3"
_SMALL, _QWEN25 = "mistralai/Mistral-Small-24B-Instruct-2501", "Qwen/Qwen2.5-7B-Instruct"
_MOE, _GLM = "Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.5-Air"
_IMAGES = "its image encoder is"

OTHERS = {
    "cohere": ("Command R", "its parallel attention and feed-forward and its layer norms are", _SMALL),
    "cohere2": ("Command R7B and A", "its sliding windows and layer norms are", _QWEN),
    "deepseek_v2": ("DeepSeek V2", "its latent attention and its mixture of experts are", _QWEN),
    "deepseek_v3": ("DeepSeek V3 or R1", "its latent attention is", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
    "deepseek_v32": ("DeepSeek V3.2", "its latent attention and its sparse choice of tokens are", _GLM),
    "dots1": ("dots.llm1", "its sigmoid router beside norms of the heads is", _MOE),
    "ernie4_5_moe": ("ERNIE 4.5 with experts", "its rotation of neighboring channels is", _MOE),
    "falcon": ("Falcon", "its layer norms and joined projections are", _LLAMA),
    "gemma": ("Gemma", "its gelu, scaled embeddings and norms around 1 are", _LLAMA),
    "gemma2": ("Gemma 2", "its soft caps on scores and logits, and its sliding windows, are", _LLAMA),
    "gemma3": ("Gemma 3 with images", "its image encoder and its sliding windows are", _QWEN),
    "gemma3_text": ("Gemma 3", "its sliding windows, gelu and two rotary bases are", "Qwen/Qwen3-0.6B"),
    "glm4": ("GLM-4", "its norms behind the blocks are", _QWEN),
    "glm4_moe_lite": ("GLM-4.7-Flash", "its latent attention is", _GLM),
    "glm_moe_dsa": ("GLM-5", "its latent attention and its sparse choice of tokens are", _GLM),
    "gpt2": ("GPT-2", "its learned positions and layer norms are", "HuggingFaceTB/SmolLM2-135M"),
    "gpt_neox": ("GPT-NeoX or Pythia", "its partial rotation and layer norms are", "HuggingFaceTB/SmolLM2-135M"),
    "gpt_oss": ("gpt-oss", "its attention sinks, clamped experts with biases and 4-bit weights are", _MOE),
    "granite": ("Granite 3", "its multipliers of embeddings, scores and logits are", _LLAMA),
    "granitemoe": ("Granite 3 with experts", "its multipliers of embeddings, scores and logits are", _MOE),
    "hunyuan_v1_moe": ("Hunyuan-A13B", "its norms behind the rotation are", _MOE),
    "llama4": ("Llama 4", "its scaled inputs of experts and chunked attention are", _MOE),
    "llava": ("LLaVA", _IMAGES, _LLAMA),
    "minimax_m2": ("MiniMax-M2", "its norms over all heads together are", _GLM),
    "ministral": ("Ministral", "its sliding windows in some layers are", _MISTRAL),
    "mistral3": ("Mistral Small 3.1 or later", _IMAGES, _SMALL),
    "mllama": ("Llama 3.2 Vision", _IMAGES, _LLAMA),
    "olmo2": ("OLMo 2", "its norms behind the blocks are", _LLAMA),
    "olmo3": ("OLMo 3", "its sliding windows and norms behind the blocks are", _QWEN),
    "olmoe": ("OLMoE", "its norms over all heads together are", _MOE),
    "phi": ("Phi-1 or Phi-2", "its partial rotation and layer norms are", "Qwen/Qwen2.5-1.5B-Instruct"),
    "phi3": ("Phi-3 or Phi-4", "its joined projections and its longrope are", "Qwen/Qwen3-4B"),
    "phimoe": ("Phi-3.5-MoE", "its sparse mixer and layer norms are", _MOE),
    "qwen2_5_vl": ("Qwen2.5-VL", _IMAGES, _QWEN25),
    "qwen2_moe": ("Qwen1.5-MoE or Qwen2-57B-A14B", "its gated shared expert is", _MOE),
    "qwen2_vl": ("Qwen2-VL", _IMAGES, _QWEN25),
    "qwen3_vl": ("Qwen3-VL", _IMAGES, _QWEN),
    "qwen3_vl_moe": ("Qwen3-VL with experts", _IMAGES, _MOE),
    "smollm3": ("SmolLM3", "its layers without rotation are", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "stablelm": ("StableLM 2", "its partial rotation and layer norms are", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "starcoder2": ("StarCoder2", "its sliding windows, gelu and layer norms are", "Qwen/Qwen2.5-Coder-7B-Instruct"),
}
"""Name of the model, its unsupported features (with a verb), and the nearest published model that works, by
`model_type`."""


def refusal(model_type: object) -> str:
    """Returns the end of a sentence that begins with a `model_type` of no supported family."""
    if isinstance(model_type, str) and model_type in OTHERS:
        name, lacks, nearest = OTHERS[model_type]
        return f"is {name}: {lacks} not computed here; the nearest that works is {nearest}"
    return (
        "is none of the families llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, glm4_moe, qwen3_next and qwen3_5; "
        f"the nearest that works may be {_QWEN}"
    )
