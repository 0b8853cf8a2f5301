"""A plan as a table for people: one screen."""

from __future__ import annotations

from typing import Any


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The lines of `whole.make_plan`."""
    return [
        *_model_lines(plan),
        *_budget_lines(plan),
        *_disk_lines(plan),
        *_memory_lines(plan),
        *_time_lines(plan),
        *_scale_lines(plan),
        *(f"notice        {notice}" for notice in plan["notices"]),
        *(f"PROBLEM       {problem}" for problem in plan["problems"]),
    ]


def _model_lines(plan: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in plan["parameters_by_part"].items() if n)
    decayed, undecayed = plan["decayed_parameters"], plan["undecayed_parameters"]
    biases = " and biases" if plan["parameters_by_part"].get("biases") else ""
    lines = [
        f"model         {plan['parameters']:,} parameters: {parts}",
        f"              {decayed:,} decayed, {undecayed:,} not (norm gains{biases}); a tied embedding is counted once",
        f"              loss of even chances ln {plan['vocab_size']:,} = {plan['uniform_loss']:.4f} nats",
    ]
    if plan["loss"] is not None:
        lines.append(f"              exp({plan['loss']:g}) = {plan['perplexity']:.4f}")
    hardware = plan["hardware_flops_per_token"] > plan["flops_per_token"]
    used = "used here" if hardware else "not used here"
    return [
        *lines,
        f"FLOPs/token   {plan['flops_per_token']:,} = 6N",
        f"              {plan['flops_per_token_with_attention']:,} with attention, 6N + 12 layers x width x T (PaLM)",
        f"              {plan['flops_per_token_causal']:,} causal half, 6N + 6 layers x width x T",
        f"              {plan['flops_per_token_with_recomputation']:,} = 8N with activation checkpointing ({used})",
    ]


def _budget_lines(plan: dict[str, Any]) -> list[str]:
    if plan["train_tokens"] is None:
        return ["budget        an epoch of a pack or of conversations that are not there yet: give --tokens 1B"]
    epochs = ""
    if plan["epochs"] is not None:
        known = {"manifest": "the pack", "conversations": "the conversations"}.get(
            plan["available_tokens_from"], "the sources' budgets"
        )
        epochs = f", {plan['epochs']:.3f} epochs of the {plan['available_tokens']:,} in {known}"
    steps = plan["gradient_accumulation_steps"]
    each = f"each on {plan['num_processes']:,} process{'es' if plan['num_processes'] > 1 else ''}"
    accumulation = "" if steps is None else f", {steps:,} micro-batch{'es' if steps > 1 else ''} {each}"
    masked = plan["positions"] > plan["train_tokens"]
    unit = "positions" if masked else "tokens"  # of windows and batches
    usual = (plan["optim"], plan["lr_schedule"]) == ("adamw", "cosine")
    grown = [
        f"              from update {stage['from_update']:,} on of {stage['global_batch_tokens']:,} {unit}: "
        f"{stage['updates']:,} updates, {stage['gradient_accumulation_steps'] or 'no whole'} micro-batches each"
        for stage in plan["stages"][1:]
    ]
    size_of_last = plan["stages"][-1]["global_batch_tokens"]
    partial = plan["last_update_tokens"] < size_of_last
    last = f"{plan['last_update_tokens']:,} {unit}, its tail masked" if partial else "full"
    stable = "" if plan["stable_updates"] is None else f": stable for {plan['stable_updates']:,} updates, then down"
    share = plan["train_tokens"] / plan["positions"]
    return [
        f"budget        {plan['train_tokens']:,} tokens{epochs}",
        *([f"              in {plan['positions']:,} positions: {share:.1%} of them are learned"] if masked else []),
        f"              {plan['tokens_per_parameter']:.2f} per parameter; 20 (a fit of one regime, no law) would be "
        f"{plan['reference_tokens']:,}",
        f"updates       {plan['updates']:,} of {plan['global_batch_tokens']:,} {unit}{accumulation}",
        *grown,
        f"              the last one {last}",
        *([] if usual else [f"rate          {plan['optim']}, {plan['lr_schedule']}{stable}"]),
        f"compute       {plan['total_flops']:.4g} FLOPs; {plan['total_flops_with_attention']:.4g} with attention",
        *([f"              {plan['optimizer_flops']:.4g} more for Muon"] if plan["optimizer_flops"] else []),
    ]


def _disk_lines(plan: dict[str, Any]) -> list[str]:
    sizes = ", ".join(f"{kind} {size(plan['export_bytes'][kind])}" for kind in ("f16", "q8_0", "q4_0", "q4_k_m"))
    each = plan["checkpoint_bytes"] / plan["parameters"]
    lines = [f"checkpoint    {size(plan['checkpoint_bytes'])} ({each:.3g} bytes per parameter)"]
    if plan["rotation_bytes"] is not None:
        lines.append(
            f"disk          {size(plan['rotation_bytes'])} for {plan['checkpoints_at_once']} checkpoints at once, "
            f"{size(plan['final_bytes'])} for the final model and exports"
        )
    lines.append(f"GGUF          {sizes}")
    if plan["shard_bytes"] is not None:
        lines.append(
            f"shards        {size(plan['shard_bytes'])} for {plan['shard_ids']:,} ids ({plan['shard_bytes_from']})"
        )
    return lines


def _memory_lines(plan: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name.replace('_', ' ')} {gib(n)}" for name, n in plan["peak_memory_by_part"].items() if n)
    lines = [
        f"memory        {gib(plan['peak_memory_bytes'])} GiB at the peak on a {plan['memory_of']}, estimated",
        f"              {parts}",
        f"              {gib(plan['peak_memory_without_checkpointing_bytes'])} GiB without activation checkpointing "
        f"(activations {gib(plan['activation_bytes_without_checkpointing'])}), "
        f"{gib(plan['peak_memory_with_checkpointing_bytes'])} with it "
        f"({gib(plan['activation_bytes_with_checkpointing'])})",
    ]
    other = "cpu" if plan["memory_of"] == "gpu" else "gpu"
    lines.append(f"              on a {other} it would be {gib(plan[f'peak_memory_on_{other}_bytes'])} GiB")
    if plan["fits_device"] is not None:
        verdict = "fits" if plan["fits_device"] else "does NOT fit"
        lines.append(f"              {verdict} the {gib(plan['device_memory_bytes'])} GiB of {plan['device']}")
    return lines


def _time_lines(plan: dict[str, Any]) -> list[str]:
    if plan["hours"] is None:
        if plan["train_tokens"] is None:
            return []
        return ["time          unknown. Give --tokens_per_second N, --tokens-per-second-from RUN_DIR, or --device NAME"]
    mfu = "" if plan["mfu"] is None else f", mfu {plan['mfu']:.3f} of {plan['peak_flops'] / 1e12:,.1f} TFLOP/s"
    cost = "" if plan["cost"] is None else f", cost {plan['cost']:.2f} at {plan['price_per_hour']:g} per hour"
    whole = "" if plan["cost_end_to_end"] is None else f", cost {plan['cost_end_to_end']:.2f}"
    seconds = plan["seconds_by_part"]
    lines = [
        f"speed         {plan['tokens_per_second']:,.0f} tokens/s ({plan['speed_from']}): "
        f"{plan['flops_per_second'] / 1e12:.2f} TFLOP/s with attention, "
        f"{plan['flops_per_second_causal'] / 1e12:.2f} causal{mfu}",
        f"time          {plan['hours']:.3f} hours of training{cost}",
        f"              {plan['hours_end_to_end']:.3f} hours end to end{whole}: {plan['saves']:,} saves "
        f"{seconds['saves'] / 3600:.2f} h, {plan['evaluations']:,} evaluations {seconds['evaluation'] / 3600:.2f} h, "
        f"start-up {seconds['start-up']:.0f} s; {plan['tokens_per_second_end_to_end']:,.0f} tokens/s",
    ]
    if plan["kilowatt_hours"] is not None:
        lines.append(f"energy        {plan['kilowatt_hours']:.2f} kWh end to end")
    if plan["sessions"] is not None:
        lines.append(
            f"sessions      about {plan['sessions']:,} of about {plan['tokens_per_session']:,} tokens each "
            "(an estimate: saves, evaluations and start-up as above)"
        )
    return lines


def _scale_lines(plan: dict[str, Any]) -> list[str]:
    if not plan["scale"]:
        return []
    lines = ["scale         at 20 tokens per parameter, this batch and these FLOP/s: compute is 120 N^2"]
    for row in plan["scale"]:
        times = "" if plan["total_flops"] is None else f" ({row['total_flops'] / plan['total_flops']:.2f} x this run)"
        hours = "" if row["hours"] is None else f", {row['hours']:,.1f} hours"
        lines.append(
            f"              {row['parameters']:,} parameters: {row['tokens']:,} tokens, {row['updates']:,} updates, "
            f"{row['total_flops']:.3g} FLOPs{times}{hours}"
        )
    return lines


def size(number: int) -> str:
    """Bytes in decimal units, as file sizes are given."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def gib(number: int) -> str:
    """Bytes in GiB, as memory is given."""
    return f"{number / 2**30:.2f}"
