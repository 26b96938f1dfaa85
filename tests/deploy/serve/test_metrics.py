"""What /metrics says of the answers that were given, under vLLM's names."""

from prometheus_client.parser import text_string_to_metric_families

from polybasic.deploy import Chain
from tests.deploy.serve.serving import QUESTION, serving


def test_counts_agree_with_the_answers(chain: Chain) -> None:
    with serving(chain) as served:
        answers = [
            served.chat(temperature=1.3, seed=seed, max_tokens=20, ignore_eos=True)
            for seed in range(3)
        ]
        served.chat(max_tokens=2, logit_bias={str(chain.tokenizer.eos_token_id): 100})
        text = served.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(text.text)}
        assert all(name.startswith("polybasic:") for name in families)
        assert all(
            sample.labels["model_name"] == "tiny"
            for family in families.values()
            for sample in family.samples
        )
        told = [answer["polybasic"] for answer in answers]
        for member in ("intermediate", "draft"):
            for name, key in (
                ("spec_decode_num_draft_tokens_total", "drafted"),
                ("spec_decode_num_accepted_tokens_total", "accepted"),
            ):
                expected = sum(each[key][member] for each in told)
                assert served.metric(name, member=member) >= expected > 0
            of_places = [
                sample.value
                for sample in families["polybasic:spec_decode_num_accepted_tokens_per_pos"].samples
                if sample.labels["member"] == member and sample.name.endswith("_total")
            ]
            accepted = served.metric("spec_decode_num_accepted_tokens_total", member=member)
            assert sum(of_places) == accepted
            drafts = served.metric("spec_decode_num_drafts_total", member=member)
            assert max(of_places) <= drafts
        assert served.metric("generation_tokens_total") == 61
        prompt = len(chain.encode(QUESTION))
        assert served.metric("prompt_tokens_total") == 4 * prompt
        assert served.metric("prefix_cache_queries_total") == 4 * prompt
        assert served.metric("request_success_total", finished_reason="length") == 3
        assert served.metric("request_success_total", finished_reason="stop") == 1
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
        ):
            assert served.metric(f"{name}_count") == 4
        assert served.metric("inter_token_latency_seconds_count") < 61
        assert served.metric("num_requests_running") == served.metric("num_requests_waiting") == 0
