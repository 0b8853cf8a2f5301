"""Teach a language model to chat: conversations to a verified model that other programs talk to.

    accelerate launch recipes/sft.py --config sft-demo --init_from runs/demo/pretrain/final
    accelerate launch recipes/sft.py --config sft-smoltalk --init_from runs/mine/final --output_dir runs/chat
    torchrun --nproc_per_node 2 recipes/sft.py --config sft-persona --init_from runs/chat/final
    python recipes/sft.py --config sft-demo --resume_from_checkpoint auto

Starts from the final folder of a run, or from any Llama-style model whose tokenizer has the ChatML control tokens.
Every key of the configuration can be given as --key value. See what is learned: hf-tinylm inspect --config sft-demo
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

    from hf_tinylm.data.conversations import open_conversations
    from hf_tinylm.data.pack import special_ids
    from hf_tinylm.evaluation.prompts import SampleTexts, read_prompts
    from hf_tinylm.export.card import CardFacts, write_card
    from hf_tinylm.export.hf import add_gguf, check_engines
    from hf_tinylm.export.hub import destination_of, push_run
    from hf_tinylm.model_folder import find_model_folder
    from hf_tinylm.modeling.factory import untrained_like
    from hf_tinylm.monitor.report import write_report
    from hf_tinylm.monitor.watch import watched
    from hf_tinylm.tokenization.chat import chat_tokenizer, end_ids
    from hf_tinylm.tokenization.load import find_tokenizer, vocabulary_size
    from hf_tinylm.training.agreement import all_are_here, failure_told
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
        args.init_from = str(base := find_model_folder(config.training.init_from))
        tokenizer = chat_tokenizer(config.tokenizer.tokenizer_path or find_tokenizer(base))
        all_are_here()
        with args.main_process_first(local=True, desc="conversations"):  # the others read what it left in the cache
            chats = open_conversations(config, tokenizer, progress=args.local_process_index == 0)
        ids = {**special_ids(tokenizer), "eos_token_id": end_ids(tokenizer)}
        model = untrained_like(base, config.model, vocabulary_size(tokenizer), config.data.sequence_length, **ids)
        trainer = LMTrainer(
            model,
            args,
            chats.train,
            chats.test,
            processing_class=tokenizer,
            run_facts=chats.identity,
            run_config=config.to_dict(),
            export_bytes=export_bytes(model.config.shape, config.export.gguf),
            began=process_start(),
        )
    if (every := config.training.sample_steps) is not None:
        trainer.add_callback(SampleTexts(trainer, every, read_prompts(config.evaluation.sample_prompts), chat=True))
    if trainer.is_world_process_zero():
        print("\n".join(chats.lines()), flush=True)
    with trainer.record.held():  # the run's folder, until DONE.json is there
        with watched(trainer, config.training):
            trainer.train()

        trainer.save_model(str(final := run / "final"))
        if trainer.is_world_process_zero():
            rows, sources = trainer.record.metrics.rows(), chats.train.conversations.facts
            facts = {"tuned from": config.training.init_from, **run_summary(trainer)}
            parent = None if Path(str(config.training.init_from)).exists() else config.training.init_from  # of the Hub
            write_card(final, name, CardFacts(facts, sources, rows, True, config.export.licence, parent))
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
