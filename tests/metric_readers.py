"""The metrics that programs read from an engine's /metrics: expressions of dashboards, and names with their labels.

Left out are panels that show a router's own metrics (`vllm:current_qps`, `vllm:healthy_pods_total`, `router_*`), and
what a server without a swap space has no number for (`vllm:num_requests_swapped`, `vllm:cpu_cache_usage_perc`).
"""

from __future__ import annotations

_RATE = "[$__rate_interval]"


def _quantiles(name: str, quantiles: tuple[float, ...], matchers: str = "") -> list[str]:
    return [
        f"histogram_quantile({quantile}, sum by (le) (rate({name}_bucket{matchers}{_RATE})))" for quantile in quantiles
    ]


def _mean(name: str, matchers: str = "") -> str:
    return f"rate({name}_sum{matchers}{_RATE}) / rate({name}_count{matchers}{_RATE})"


# sgl-project/sglang: examples/monitoring/grafana/dashboards/json/sglang-dashboard.json
SGLANG_DASHBOARD = [
    *_quantiles("sglang:e2e_request_latency_seconds", (0.99, 0.9, 0.5)),
    f"avg({_mean('sglang:e2e_request_latency_seconds')})",
    f'sum(increase(sglang:e2e_request_latency_seconds_bucket{{model_name=~"$model_name"}}{_RATE})) by (le)',
    *_quantiles("sglang:time_to_first_token_seconds", (0.99, 0.9, 0.5)),
    f"avg({_mean('sglang:time_to_first_token_seconds')})",
    f'sum by(le) (increase(sglang:time_to_first_token_seconds_bucket{{model_name=~"$model_name"}}{_RATE}))',
    "sglang:num_running_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:num_queue_reqs",
]

# vllm-project/production-stack: helm/dashboards/vllm-dashboard.json and vllm-model-metrics-dashboard.json
_MODEL = '{model_name="$model_name"}'
PRODUCTION_STACK_DASHBOARDS = [
    "avg(vllm:e2e_request_latency_seconds_sum) / avg(vllm:e2e_request_latency_seconds_count)",
    "sum by(le) (vllm:e2e_request_latency_seconds_bucket)",
    "avg(vllm:time_per_output_token_seconds_sum) / avg(vllm:time_per_output_token_seconds_count)",
    "sum by(le) (vllm:time_to_first_token_seconds_bucket)",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    'vllm:gpu_prefix_cache_hits_total{endpoint="service-port"} / vllm:gpu_prefix_cache_queries_total',
    *_quantiles("vllm:e2e_request_latency_seconds", (0.99, 0.95, 0.9, 0.5), _MODEL),
    _mean("vllm:e2e_request_latency_seconds", _MODEL),
    f"rate(vllm:prompt_tokens_total{_MODEL}{_RATE})",
    f"rate(vllm:generation_tokens_total{_MODEL}{_RATE})",
    *_quantiles("vllm:time_per_output_token_seconds", (0.99, 0.95, 0.9, 0.5), _MODEL),
    *_quantiles("vllm:request_time_per_output_token_seconds", (0.99, 0.95, 0.9, 0.5), _MODEL),
    _mean("vllm:time_per_output_token_seconds", _MODEL),
    _mean("vllm:request_time_per_output_token_seconds", _MODEL),
    f"vllm:num_requests_running{_MODEL}",
    f"vllm:num_requests_waiting{_MODEL}",
    *_quantiles("vllm:time_to_first_token_seconds", (0.99, 0.95, 0.9, 0.5), _MODEL),
    _mean("vllm:time_to_first_token_seconds", _MODEL),
    f"vllm:gpu_cache_usage_perc{_MODEL}",
    f"vllm:kv_cache_usage_perc{_MODEL}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{_MODEL}{_RATE}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{_MODEL}{_RATE}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{_MODEL}{_RATE}))",
    f"rate(vllm:request_queue_time_seconds_sum{_MODEL}{_RATE})",
    f"rate(vllm:request_prefill_time_seconds_sum{_MODEL}{_RATE})",
    f"rate(vllm:request_decode_time_seconds_sum{_MODEL}{_RATE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{_MODEL}{_RATE})",
]

# PrimeIntellect-ai/prime-rl: src/prime_rl/orchestrator/{inference_metrics,concurrency}.py; by the label `engine`.
PRIME_RL_CONTROLLER = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    'vllm:num_requests_waiting_by_reason{reason="capacity"}',
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    *[
        f"vllm:{name}_seconds_{part}"
        for name in (
            *("request_prefill_time", "request_decode_time", "request_queue_time"),
            *("time_to_first_token", "inter_token_latency", "e2e_request_latency"),
        )
        for part in ("sum", "count")
    ],
]
PRIME_RL_CAPACITY = ("vllm:cache_config_info", ("kv_cache_size_tokens", "num_gpu_blocks", "block_size"))

# radixark/miles: its dashboard's scraper; by the labels `engine_type` and `dp_rank`.
MILES_DASHBOARD = [
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:gen_throughput", "sglang:token_usage"),
    *("sglang:cache_hit_rate", "sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("sglang:num_requests_total", "sglang:num_aborted_requests_total"),
    *[
        f"sglang:{name}_seconds_{part}"
        for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency")
        for part in ("sum", "count")
    ],
]

# llm-d's endpoint picker: names, and the labels that it takes sizes from.
LLM_D = [
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage"),
]
LLM_D_SIZES = [
    ("vllm:cache_config_info", ("block_size", "num_gpu_blocks")),
    ("sglang:cache_config_info", ("page_size", "num_pages")),
]
