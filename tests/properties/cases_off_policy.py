"""Cases of the objectives for stale data and for samplers that disagree with the trainer."""

from property_inputs import Case


def versions(rng, p, g, t):
    return {"policy_version": rng.integers(0, 5, (p, g, t)), "extras": {"current_version": rng.integers(2, 5, p)}}


OBJECTIVES = {
    "gspo": [Case({"clip_low": 0.1, "clip_high": 0.15})],
    "gspo_token": [Case({"clip_low": 0.1, "clip_high": 0.15})],
    "cispo": [Case(), Case({"max_ratio": 2.0, "clip_low": 0.2, "clip_high": 0.28, "anchor": "behavior"})],
    "minpro": [Case(), Case({"include_current": False, "embed": "ppo_clip", "cap": 1.5})],
    "bapo": [Case(), Case({"order": "high_first", "statistic": "gradient", "target": 2.0})],
    "r2vpo": [Case(), Case({"dual_rate": 0.0, "anchor": "behavior"}), Case({"max_multiplier": 0.05})],
    "hispo": [Case({"max_len": 8, "sequence_gate": 0.3})],
    "tis_mis": [
        Case({"bound": "clip", "level": "sequence", "normalise": True}),
        Case({"bound": "seq_mask", "veto": 0.7, "aggregation": "seq_mean_token_mean"}),
        Case({"reject": "token_k1", "reject_max": 1.3, "normalise": True, "aggregation": "prompt_mean"}),
        Case({"reject": "seq_max_k3", "reject_max": 0.1, "bound": "mask", "level": "geometric",
              "denominator": "original"}),
        Case({"reject": "token_k1", "reject_max": 1.3, "dual_clip": 1.5}),
    ],
    "areal_decoupled_ppo": [
        Case(),
        Case({"level": "sequence", "bound": "clip", "max_ratio": 1.2, "dual_clip": 1.5, "proximal": "interpolated"},
             inputs=versions),
    ],
}
