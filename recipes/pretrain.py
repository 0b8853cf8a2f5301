"""Pretrain a language model: from a tokenizer and token shards to a verified model that other programs open.

    accelerate launch recipes/pretrain.py --config recipes/configs/demo.yaml
    accelerate launch recipes/pretrain.py --config demo --learning_rate 4e-3 --output_dir runs/second
    torchrun --nproc_per_node 2 recipes/pretrain.py --config demo
    python recipes/pretrain.py --config demo --resume_from_checkpoint auto

Every key of the configuration can be given as --key value. Write the tokenizer and the shards first:
    hf-tinylm tokenizer train --config demo
    hf-tinylm prepare --config demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_tinylm.commands.options import recipe_config
from hf_tinylm.errors import exit_with_error_line
from hf_tinylm.planning import export_bytes
from hf_tinylm.training.interrupt import INTERRUPT


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; the exit code."""
    config = recipe_config(__doc__, arguments)  # before the heavy imports: a typo is told at once

    from hf_tinylm.data.pack import open_pack, special_ids
    from hf_tinylm.evaluation.prompts import SampleTexts, read_prompts
    from hf_tinylm.export.card import CardFacts, write_card
    from hf_tinylm.export.hf import add_gguf, check_engines
    from hf_tinylm.export.hub import destination_of, push_run
    from hf_tinylm.modeling.factory import new_model
    from hf_tinylm.monitor.report import write_report
    from hf_tinylm.monitor.watch import watched
    from hf_tinylm.preflight.run import check_before_training
    from hf_tinylm.training.agreement import failure_told
    from hf_tinylm.training.arguments import training_arguments
    from hf_tinylm.training.clocks import process_start
    from hf_tinylm.training.finish import run_summary, write_done
    from hf_tinylm.training.trainer import LMTrainer

    check_engines(config.export.gguf, config.export.verify)
    args = training_arguments(config)
    run = Path(str(args.output_dir))
    name = config.training.run_name or run.resolve().name
    with failure_told():  # to processes on other machines
        destination = destination_of(config.export, name) if args.process_index == 0 else None
        pack = open_pack(config, verify=args.local_process_index == 0)
        model = new_model(
            config.model,
            pack.shards.vocab_size,
            config.data.sequence_length,
            config.training.seed,
            **special_ids(pack.tokenizer),
        )
        trainer = LMTrainer(
            model,
            args,
            pack.train,
            pack.validation,
            processing_class=pack.tokenizer,
            token_bytes=pack.token_bytes,
            run_facts=pack.identity,
            run_config=config.to_dict(),
            export_bytes=export_bytes(model.config.shape, config.export.gguf),
            began=process_start(),
            eval_sets=pack.eval_sets,
        )
    if (every := config.training.sample_steps) is not None:
        trainer.add_callback(SampleTexts(trainer, every, read_prompts(config.evaluation.sample_prompts)))
    if config.training.preflight:
        check_before_training(trainer, pack, config)
    with trainer.record.held():  # the run's folder, until DONE.json is there
        with watched(trainer, config.training):
            trainer.train()

        final = run / "final"
        trainer.save_model(str(final))
        if trainer.is_world_process_zero():
            rows, sources = trainer.record.metrics.rows(), pack.shards.manifest["sources"]
            write_card(final, name, CardFacts(run_summary(trainer), sources, rows, licence=config.export.licence))
            exported = add_gguf(final, run, name, config.export.gguf, config.export.verify)
            for line in exported.lines():
                print(line)
            write_done(trainer, final)
            write_report(run)
            push_run(run, destination)
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    INTERRUPT.install()  # a signal ends the run cleanly, from the first moment on
    sys.exit(exit_with_error_line(main))
