"""The models and layouts of gpu_proof_parts.py, as overrides of the configuration."""

TINY = [
    "model=gpt_tiny",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=128",
    "model.vocab=500",
    "batch.global_size=4",
    "batch.micro_size=1",
    "batch.sequence_length=64",
    "data.learnable=false",
]
SMALL = [
    "model=gpt_small",
    "data=synthetic",
    "batch.global_size=32",
    "batch.micro_size=8",
    "batch.sequence_length=1024",
    "train.dtype=bf16",
]
BILLION = [
    "model=gpt_small",
    "data=synthetic",
    "model.name=gpt_1b",
    "model.layers=20",
    "model.hidden=2048",
    "model.heads=16",
    "model.kv_heads=16",
    "model.ffn=8192",
    "model.max_positions=2048",
    "batch.global_size=16",
    "batch.micro_size=4",
    "batch.sequence_length=2048",
    "train.dtype=bf16",
]
LAYERS_8B = [
    "model=llama3_1_8b",
    "data=synthetic",
    "model.layers=4",
    "batch.global_size=8",
    "batch.micro_size=1",
    "batch.sequence_length=8192",
    "train.dtype=bf16",
]
MIXTURE = [
    *BILLION,
    "model.name=mixture",
    "model.layers=12",
    "model.ffn=2048",
    "model.swiglu=true",
    "model.bias=false",
    "model.experts.count=16",
    "model.experts.top_k=4",
    "model.experts.balance=0.01",
]
EXPERTS = ["model.experts.count=4", "model.experts.top_k=2", "model.experts.balance=0.01"]
LAYOUTS = {  # name: (ranks, layout, model and numbers). All ranks share the GPU
    "TP 2": (2, ["plan.tp=2"], []),
    "PP 2, eager 1F1B": (2, ["plan.pp=2", "plan.schedule=eager_1f1b"], []),
    "PP 2, zero bubble": (2, ["plan.pp=2", "plan.schedule=zero_bubble"], []),
    "DP 2": (2, [], []),
    "CP 2, all-to-all": (2, ["plan.cp=2", "plan.cp_comm=a2a"], []),
    "CP 2, ring": (2, ["plan.cp=2", "plan.cp_comm=ring"], ["train.dtype=bf16"]),
    "EP 2": (2, ["plan.ep=2"], EXPERTS),
    "EP 2, bf16: products of experts together": (2, ["plan.ep=2"], [*EXPERTS, "train.dtype=bf16"]),
    "PP 2, EP 2": (4, ["plan.pp=2", "plan.ep=2"], EXPERTS),
    "TP 2, CP 2, ring": (4, ["plan.tp=2", "plan.cp=2", "plan.cp_comm=ring"], ["train.dtype=bf16"]),
}
