"""Words of Slurm, Hugging Face, Megatron-LM and DeepSpeed: the key here that means the same, or what to do instead."""

import re

# key -> its names elsewhere
_SYNONYMS = {
    "batch.global_size": "batch_size global_batch_size train_batch_size total_batch_size",
    "batch.micro_size": "micro_batch_size mbs per_device_train_batch_size train_micro_batch_size_per_gpu",
    "batch.sequence_length": "seq_length seq_len sequence_len max_seq_length max_seq_len max_length context_length"
    " block_size n_ctx",
    "checkpoint": "load resume_from_checkpoint init_from pretrained_checkpoint model_name_or_path",
    "data.documents": "reset_attention_mask eod_mask_loss",
    "data.prefix": "data_path path dataset dataset_path train_data_path train_file",
    "data.tokenizer": "tokenizer_model tokenizer_name tokenizer_path",
    "launcher": "executor backend",
    "model.dropout": "hidden_dropout attention_dropout",
    "model.ffn": "ffn_hidden_size intermediate_size n_inner mlp_hidden_size",
    "model.head_dim": "kv_channels",
    "model.heads": "num_attention_heads num_heads n_head n_heads",
    "model.hidden": "hidden_size d_model n_embd dim",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers",
    "model.max_positions": "max_position_embeddings",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.rope_base": "rope_theta rotary_base",
    "model.tied": "tie_word_embeddings",
    "model.vocab": "vocab_size padded_vocab_size",
    "name": "run_name exp_name experiment_name job_name",
    "plan.cp": "context_parallel context_parallel_size cp_size",
    "plan.cp_comm": "cp_comm_type",
    "plan.dp": "data_parallel data_parallel_size dp_size",
    "plan.ep": "expert_parallel expert_parallel_size expert_model_parallel_size ep_size",
    "plan.gpus_per_node": "gpus ngpus gpus_per_task nproc_per_node ntasks_per_node",
    "plan.nodes": "nnodes num_nodes",
    "plan.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "plan.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity recompute_activations",
    "plan.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "plan.virtual_stages": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size vpp",
    "run_dir": "output_dir output_path save_dir",
    "slurm.cpus_per_task": "cpus dataloader_num_workers",
    "slurm.exclude": "exclude_nodes",
    "slurm.mem": "memory mem_per_node",
    "slurm.timeout_min": "time time_limit timelimit walltime timeout",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.checkpoint_dir": "save",
    "train.checkpoint_interval": "save_interval save_steps save_every checkpoint_every",
    "train.checkpoint_keep": "save_total_limit",
    "train.clip_grad": "max_grad_norm grad_clip gradient_clipping gradient_clip_val",
    "train.dtype": "precision mixed_precision torch_dtype bf16 fp16 param_dtype",
    "train.eps": "adam_eps adam_epsilon",
    "train.eval_interval": "eval_every val_check_interval",
    "train.eval_steps": "eval_iters max_eval_steps",
    "train.grad_dtype": "grad_reduce_dtype accumulate_allreduce_grads_in_fp32",
    "train.log_interval": "logging_steps",
    "train.lr": "learning_rate max_lr peak_lr",
    "train.lr_decay_steps": "lr_decay_iters",
    "train.lr_schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "train.min_lr": "min_learning_rate lr_min",
    "train.net_timeout_s": "distributed_timeout_minutes ddp_timeout",
    "train.openmetrics": "prometheus prometheus_port metrics_port",
    "train.optimizer": "optim",
    "train.profile": "profiler torch_profiler use_pytorch_profiler",
    "train.steps": "max_steps train_iters train_steps num_steps total_steps max_iters iterations",
    "train.warmup_steps": "warmup num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters",
    "train.wandb": "wandb_project report_to",
    "train.weight_decay": "wd",
}
_KEYS = {name: key for key, names in _SYNONYMS.items() for name in names.split()}
_ADVICE = {  # pattern -> what to do
    r"slurm\.partitions?": "write partitions=[NAME,…], without a group",
    r"partition": "write partitions=[NAME,…] for Slurm's, or plan.partition=… for the layers of the stages",
    r"(train\.)?(\w*tokens|train_samples)": "write train.steps=N: a step takes batch.global_size *"
    " batch.sequence_length tokens, and `holmes plan --tokens T` computes N",
    r"(\w+\.)?\w*epochs?": "epochs are not supported: write train.steps=N",
    r"(\w+\.)?(gradient_accumulation\w*|grad_accum\w*)": "write batch.global_size=N and batch.micro_size=M: the plan"
    " derives the number of micro-batches from them",
    r"(\w+\.)?(warmup_ratio|lr_warmup_fraction)": "write train.warmup_steps=N",
    r"(\w+\.)?(ulysses\w*|ring_attention)": "plan.cp shares sequences, by plan.cp_comm",
    r"(\w+\.)?(num_(local_)?experts|n_routed_experts|experts|moe(_\w+)?|etp|router\w*)": "write model.experts.KEY=… of"
    " count, top_k, ffn, balance; plan.ep shares experts among ranks",
    r"mixtral.*|deepseek.*|.*_a\d+b|gpt_oss.*|glm4.*": "of mixtures of experts, only mixtral_8x7b, mixtral_8x22b,"
    " qwen3_30b_a3b and qwen3_235b_a22b have names: give model.experts.count and the other sizes",
    r"(\w+\.)?(zero\w*|fsdp\w*|deepspeed)": "only optimizer states are sharded: plan.distributed_optimizer=true",
    r"(\w+\.)?(lora\w*|peft\w*|load_in_[48]bit)": "adapters and quantised weights are not supported",
    r"(slurm\.)?(ntasks|tasks_per_node|constraint|nodes_per_\w+|het\w*)": "components come from the plan: "
    "plan.nodes={POOL: NODES} and plan.gpus_per_node=N change it",
    r"slurm\.(output|error|chdir|comment|mail_\w+|switches|nice|begin)": "write 'slurm.additional={NAME: VALUE}'",
}


def key_elsewhere(name: str) -> str | None:
    """Return the key that other programs call `name`, with or without a group; None without one."""
    return _KEYS.get(_plain(name).rpartition(".")[2])


def unsupported_hint(name: str) -> str | None:
    """Return a hint for a word of other programs that has no key or model here; None for any other word."""
    return next((text for pattern, text in _ADVICE.items() if re.fullmatch(pattern, _plain(name))), None)


def _plain(name: str) -> str:
    return name.lower().lstrip("+-").replace("-", "_")
