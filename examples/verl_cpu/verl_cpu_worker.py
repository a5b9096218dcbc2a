"""Weight sync into vLLM's CPU build.

verl copies new weights over vLLM's parameters. On the CPU that is not enough, and most of it fails silently, because
vLLM keeps *derived* copies of its weights: linear layers are repacked for the matrix kernels when the model is loaded.
Three of them matter, and a training run goes on with stale ones without an error (only
`training/rollout_actor_probs_pearson_corr` shows it):

* repacked linear layers: vLLM's own layerwise reload restores the original layout, loads, and packs again;
* a tied `lm_head`: no tensor of that name arrives, so the reload never packs it again;
* `MambaMixer2.conv_weights`: a buffer made from the convolution's weight when the layer was built.

Everything is received before anything is loaded: an exception between two buckets would leave verl's sender waiting
for an acknowledgement for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWeightSync(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """verl's worker extension with a weight update that leaves nothing stale on the CPU.

    Named in `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
    """

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        # The bucket's buffer is reused by the next one: keep copies.
        receiver.receive_weights(
            on_bucket_received=lambda bucket, _is_last: weights.extend((name, t.clone()) for name, t in bucket)
        )
        self.load_received_weights(weights)

    def load_received_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a full set of named tensors (Hugging Face names) and rebuild every derived copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        self.reload_weights(weights_iterator=iter(weights))
        for layer in self.model_runner.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
            if hasattr(layer, "conv_weights") and hasattr(layer, "conv1d"):
                unpacked = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
                source = layer.conv1d.weight if unpacked is None else unpacked
                layer.conv_weights.copy_(source.view_as(layer.conv_weights))
