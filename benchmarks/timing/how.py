"""How docs/performance.md says that it is measured."""

HOW = """\
## How it is measured

```bash
bash benchmarks/gpu.sh                  # one GPU: checks, rows, sweep, counters, quickstart; one JSON, 3 x 9 minutes
bash benchmarks/gpu.sh --stage 1        # one stage of the three; the next command goes on where this one ended
bash benchmarks/gpu.sh --smoke          # no GPU: all of it at toy size, checked, nothing timed
python benchmarks/kernels.py            # one GPU; writes benchmarks/results/kernels-<device>.json after every row
python benchmarks/kernels.py --resume   # adds the rows that there was no time for
python benchmarks/kernels.py --sweep    # launch shapes of two row kernels, as lines for triton_kernels/launch_table.py
TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke     # no GPU: every row at toy size, checked, nothing timed
python benchmarks/performance_docs.py > docs/performance.md
```

`gpu.sh` needs a checkout of this repository, and Python 3.11 or newer with torch and Triton 3.5 or newer. It needs no
network, and installs nothing. In a container:

```bash
docker run --rm --gpus 1 --ipc host -v "$PWD:/megatron_rc" -w /megatron_rc IMAGE bash benchmarks/gpu.sh
```

IMAGE is any image with these, such as the one that you train in: then Megatron-Core is a peer, and the quickstart runs.
`--cap-add SYS_ADMIN` lets Nsight Compute read counters, where the image has `ncu`. What is missing is written down and
costs nothing else. `runs/gpu/gpu-<device>.json` is the file to send back; copied to `benchmarks/results/`, it fills
this page.

* **Correct first.** Every answer of every provider is compared with fp64 everywhere, some rows at a time; a provider
  whose answer is wrong has no time. Log-probs and entropy of ours must be within 1e-4 nats, and a bf16 gradient not
  more than 1.5 times as far from fp64 as the rounded fp64 gradient is. The run ends with an error otherwise.
* **Device time** is that of CUDA events: the median of 7 to 50 calls, providers by turns. Two equal sets of logits are
  used by turns, and before every timed phase four times the L2 cache is read. The device is kept busy until the host
  has queued the phase, so host gaps are not in it. Forward and backward are timed apart.
* **Bandwidth** is measured first, on 8.6 GB: the best of several ways to read, and to copy. Shares count each byte that
  has to move once, as in the table above.
* **Peers** get what helps them: in-place gradients where they have them, compilation before timing. Those for
  tensor-parallel logits run in a real process group of one rank; a shard has vocabulary / TP columns, and nobody's
  collective between ranks is timed. At TP > 1 log-probs are compared with peers made for sharded logits only. A peer
  that raises is recorded with what it said, and the others go on; one that leaves the device unusable, or does not come
  back in two minutes, ends the process and is not called again by `--resume`.
* **Peers of the head** are PyTorch's `linear_cross_entropy` with its default options for chunks, where torch has it,
  and Liger's fused linear cross entropy, where it is installed. They are timed on the loss that both have, the sum of
  -log-probs on one rank (row "cross entropy"), and return the weight's gradient in bf16, where ours adds to an fp32
  main_grad. Neither has a temperature, an entropy, kept ids or a vocabulary in shards, so the policy loss itself is
  compared with PyTorch eager and with logits in place alone. megatron-core 0.16 to 0.19 has no such head.
* **Under a temperature** peers get fp32 logits / temperature, which bf16 would round too coarsely; **under a mask**
  they compute every row, and the gradient that comes back to a masked row is 0.
* **`correct`** is compared with the recipe of a training framework (`benchmarks/timing/recipe.py`: padded, one masked
  mean and one `.item()` per metric), wall time against wall time, both ending with the metrics as floats.
* **Launches** on a GPU are the kernels, copies and fills in the profiler's trace.
* **Memory** is the peak of one forward and backward beyond what was allocated before it, the gradient included where it
  is not written in place.
* **Clocks and power** are read from nvidia-smi when a row ends.

Peers are used where they can be imported. `--transformer-engine` takes the folder `transformer_engine` of a checkout or
of an unpacked wheel, `--flash-attention` the file `flash_attn/ops/triton/cross_entropy.py`: their Triton files need no
build. A wheel of TransformerEngine belongs unpacked beside `sys.path`, not on it: without its compiled libraries it
cannot be imported.
"""
