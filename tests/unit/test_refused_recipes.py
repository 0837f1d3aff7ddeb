"""Recipes of which a part can never be meant, or would never do what it says: refused as they are read, by name."""

import pytest

from asyncrl.errors import ConfigError
from tests.make import quickstart
from tests.unit.test_branches import DISTILLS
from tests.unit.test_remote_parts import BY_VLLM, REMOTE

GREEDY = "rollout.sampling.temperature=0"
BASELINE = "algorithm.advantage=reinforce_plus_plus"
AGENT = "rollout.environment=agent"
MEGATRON = "trainer.backend=megatron"
SPLIT = (MEGATRON, "trainer.megatron.tensor_parallel=2")
RELOAD = (*REMOTE, "rollout.remote.weights=reload")
KEEPS = ("rollout.sampling.keep_sets=true", "rollout.sampling.top_p=0.9")
SHARED = ("rollout.engine=vllm", "trainer.num_ranks=2", "rollout.num_replicas=2", "rollout.vllm.gpu_share=0.4")


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["algorithm.dynamic_sampling=true", "batch.group_size=1", BASELINE], "no other to be compared with"),
        ([GREEDY], "all alike"),
        (["algorithm.kl.path=other"], "no reference model"),
        (["algorithm.kl.place=reward"], "nothing is taken"),
        (["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1"], "0 on average"),
        (["algorithm.kl.coefficient=.inf"], "finite"),
        (["algorithm.entropy_coefficient=.inf"], "finite"),
        (["algorithm.fixed_tokens=100"], "only aggregation fixed"),
        (["algorithm.loss=gspo"], "one token"),
        (["algorithm.advantage=gae", "algorithm.critic.warmup_steps=80"], "never be trained"),
        (["trainer.lr=.inf"], "finite"),
        (["trainer.decay_steps=50"], "does not fall"),
        (["trainer.schedule=cosine", "trainer.warmup_steps=81"], "before the learning rate has risen"),
        (["trainer.lora.dropout=1"], "at least 0 and below 1"),
        (["algorithm.overlong.buffer_tokens=65"], "at most 64 tokens"),
        (["algorithm.preset=gspo", "algorithm.dual_clip=3"], "only clipped_surrogate"),
        (["algorithm.preset=dr_grpo", "algorithm.group_std=sample"], "only advantage grpo divides by it"),
        (["algorithm.preset=m2po", "algorithm.ratio=proximal", "algorithm.proximal=log_linear"], "is to save"),
        (["algorithm.corrections=[{name: icepop, normalize: true}]"], "weigh nothing there"),
        (["algorithm.kl.importance_weighted=true"], "no divergence in the loss"),
        (["algorithm.router_aux_coefficient=-1"], "at least 0"),
        (["trainer.num_ranks=2", "weights.overlap=false", "weights.transfer_timeout_s=600"], "wait in a collective"),
        (["algorithm.preset=dr_grop"], r"did you mean dr_grpo\?"),
        (["trainer.num_threads=0"], "trainer.num_threads=0"),
        (["rollout.torch.num_threads=0"], "rollout.torch.num_threads=0"),
        (["rollout.engine=sglang", "rollout.interrupt=keep"], "stream_interval=1"),
        (["trainer.router_replay=rollout", "trainer.compile=true"], r"router_replay=rollout with trainer\.compile"),
        (["algorithm.router_aux_coefficient=0.1", "trainer.compile=true"], r"aux_coefficient with trainer\.compile"),
        (
            ["trainer.router_replay=rollout", "rollout.engine=vllm", "rollout.vllm.enable_prefix_caching=false"],
            "prefix cache",
        ),
        (KEEPS, "nothing bounds the set"),
        ([*KEEPS, "rollout.sampling.top_k=8", GREEDY], "a greedy token has none"),
        ([*KEEPS, "rollout.sampling.top_k=8", MEGATRON], "only backend fsdp"),
        ([*DISTILLS, "teacher.engine=vllm", "teacher.vllm.gpu_share=0.5"], r"gpu_share=0\.5 of a teacher or judge"),
        (["rollout.gymnasium.kwargs={maps: {size: .inf}}"], r"rollout\.gymnasium\.kwargs\.maps\.size"),
        ([*SHARED, "weights.transport=collective"], r"gpu_share=0\.4 with weights\.transport(?s:.)*Duplicate GPU"),
        ([*SHARED, "weights.transport=ipc", "trainer.device=cpu"], r"trainer\.device=cpu"),
        # teachers
        (["teacher.path=t"], "nobody asks the teacher"),
        (["algorithm.distillation.coefficient=1"], "there is no teacher"),
        ([*DISTILLS, "rollout.sampling.temperature=0.7"], "at temperature 1 without filters"),
        ([*DISTILLS, "rollout.sampling.top_k=5"], "at temperature 1 without filters"),
        ([*DISTILLS, "algorithm.dynamic_sampling=true"], "would be filtered"),
        ([*DISTILLS, "teacher.torch.max_model_len=100"], "have 161 tokens"),
        ([*DISTILLS, "teacher.num_replicas=0"], "num_replicas"),
        (["algorithm.advantage=teacher_only"], "nothing would be learned"),
        (["algorithm.distillation.top_k=8"], "there is no divergence to compute"),
        ([*DISTILLS, "algorithm.distillation.top_k=-1"], "top_k"),
        ([*DISTILLS, "algorithm.distillation.top_k=8", "trainer.backend=megatron"], "only backend fsdp"),
        # judges and group rewards
        (["reward.judge.weight=1"], "there is no judge"),
        (["judge.path=j"], "nobody asks the judge"),
        (["judge.path=j", "reward.judge.weight=1", "reward.judge.pairwise=true"], r"no \{first\}"),
        (["reward.judge.read=text"], "0 groups"),
        (["reward.judge.answers={only: 1}", "reward.judge.weight=1"], "nothing to choose from|nobody|there is no"),
        (["reward.function=zero"], "nothing else teaches"),
        (["reward.group.function=a:b", "reward.group.weight=0"], "would add nothing"),
        (
            ["reward.group.function=a:b", "reward.group.pairwise=true", "batch.group_size=1", "algorithm.preset=null"],
            "no other to be compared with",
        ),
        # servers of others
        (("rollout.engine=remote",), r"num_replicas=2(?s:.)*names 0 server(?s:.)*rollout\.remote\.urls="),
        ((*REMOTE, "rollout.num_replicas=3"), r"names 2 server(?s:.)*num_replicas=2"),
        ((*REMOTE, "rollout.max_replicas=3"), r"max_replicas=3 with rollout\.engine=remote"),
        ((*REMOTE, "rollout.remote.urls=[http://a,http://a]"), "http://a twice"),
        ((*REMOTE, "placement=colocated", "mode=sync"), r"placement=colocated with rollout\.engine=remote"),
        (RELOAD, r"weights=reload with weights\.transport=ipc"),
        (
            (*RELOAD, "weights.transport=disk", "weights.disk_directory=s3://bucket/x"),
            r"weights=reload with weights\.disk_directory=s3",
        ),
        ((*RELOAD, "weights.transport=disk", "weights.encoding=delta"), "weights.encoding=delta"),
        ((*RELOAD, "weights.transport=disk", "trainer.lora.rank=4"), "lora.rank=4"),
        ((*REMOTE, "weights.transport=collective", "trainer.lora.rank=4"), "engine=remote with trainer.lora.rank=4"),
        ((*BY_VLLM, "weights.transport=disk"), r"weights=native with weights\.transport=disk"),
        ((*BY_VLLM, "weights.verify=first"), r"weights=native with weights\.verify=first"),
        ((*BY_VLLM, "trainer.device=cpu"), r"weights=native with trainer\.device=cpu"),
        ((*BY_VLLM, "trainer.lora.rank=4"), "lora.rank=4"),
        ((*REMOTE, "ray.start_timeout_s=100"), r"wait_s=240(?s:.)*start_timeout_s=100"),
        ((*REMOTE, "rollout.remote.lost_after_s=0"), "lost_after_s"),
        # agents
        ([AGENT, "rollout.agent.function=a:b", "rollout.agent.command=[c]"], "they exclude each other"),
        ([AGENT, "rollout.agent.advertise=host:80"], "no base URL of an OpenAI client"),
        ([AGENT, "rollout.agent.advertise='http://{name}/v1'"], "no base URL of an OpenAI client"),
        ([AGENT, "rollout.agent.advertise=http://host:80/"], "no base URL of an OpenAI client"),
        ([AGENT, "rollout.num_rollouters=2", "rollout.agent.port=8000"], "of one machine cannot share a port"),
        (
            [AGENT, "rollout.num_rollouters=2", "rollout.agent.advertise=http://x/v1"],
            "only the keys of its trajectories",
        ),
        # layouts
        ([*SPLIT, "trainer.num_ranks=3"], "multiple of 2"),
        ([*SPLIT, "trainer.num_ranks=4", "trainer.megatron.expert_parallel=4"], "num_ranks=4(?s:.)*multiple of 8"),
        ([MEGATRON, "trainer.num_ranks=3", "trainer.megatron.context_parallel=2"], "context 2(?s:.)*multiple of 2"),
        (
            [MEGATRON, "trainer.device=cpu", "trainer.megatron.layers=transformer_engine"],
            "computes on CUDA(?s:.)*layers=local",
        ),
        ([MEGATRON, "trainer.num_ranks=2", "trainer.megatron.chunks_per_stage=2"], "chunks_per_stage=2"),
        ([MEGATRON, "trainer.lora.rank=4"], "trainer.lora.rank"),
        ([MEGATRON, "trainer.compile=true"], "trainer.compile"),
        ([MEGATRON, "trainer.num_ranks=2", "trainer.fsdp.context_parallel=2"], r"set trainer\.megatron\.context"),
        ([MEGATRON, "trainer.fsdp.head_dtype=float32"], "head_dtype=float32"),
        (["trainer.num_ranks=4", "trainer.fsdp.context_parallel=3"], "it does not divide trainer.num_ranks=4"),
        (
            ["trainer.num_ranks=4", "trainer.fsdp.context_parallel=2", "trainer.fsdp.attention=flash_attention_2"],
            "does not exchange tokens for heads",
        ),
    ],
)
def test_what_can_never_be_meant_is_refused(overrides, found):
    with pytest.raises(ConfigError, match=found):
        quickstart(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [GREEDY, BASELINE],
        ["algorithm.preset=reinforce_plus_plus", "algorithm.kl.coefficient=0"],
        ["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1", "algorithm.kl.place=reward"],
        ["algorithm.critic.warmup_steps=80"],
        ["trainer.schedule=linear", "trainer.decay_steps=50"],
        ["algorithm.overlong.buffer_tokens=64"],
    ],
)
def test_what_looks_like_it_and_has_a_use_is_not(overrides):
    quickstart(*overrides)
