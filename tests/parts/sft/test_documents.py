"""Documents of supervised training, and how steps are filled with them."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.parts.sft.documents import filled, num_tokens, reply_of, to_documents
from tests.parts.sft.supervised import make_documents


def test_a_response_is_the_solution_and_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = train_byte_bpe(["1+2\n3"], tmp_path, 270)
    prompt_T = tokenizer.encode("1+2\n")
    (document,) = to_documents([prompt_T], ["3"], tokenizer)
    (sample,) = document.samples
    assert document.prompt_token_ids_T is prompt_T
    assert sample.token_ids_T.tolist() == [*tokenizer.encode("3"), *tokenizer.eos_token_ids]
    assert sample.token_ids_T.dtype == np.int32
    assert sample.loss_mask_T.all()
    assert num_tokens(document) == len(prompt_T) + 2


def test_of_several_ends_the_tokenizer_s_own_is_learnt(tmp_path: Path) -> None:
    """Chat models name the end of text in `generation_config.json` too, often with a smaller id."""
    train_byte_bpe(["1+2\n3"], tmp_path, 270)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|endoftext|>"', '"eos_token": "z"'))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0]}')
    tokenizer = Tokenizer(tmp_path)
    (own,) = tokenizer.encode("z")
    (document,) = to_documents([tokenizer.encode("1")], ["3"], tokenizer)
    assert tokenizer.eos_token_ids == (0, own)
    assert document.samples[0].token_ids_T[-1] == own


@pytest.mark.parametrize("solution", [None, "", 3])
def test_a_row_without_a_solution_is_refused(solution: object) -> None:
    row = ProblemRow(problem_id="r7", question="1?", answer="1", metadata={"solution": solution})
    with pytest.raises(ConfigError, match=r"data\.train: row 'r7' has no `solution`"):
        reply_of(row, "data.train")


def test_a_reply_comes_before_a_solution_and_any_column_may_be_one() -> None:
    said = {"role": "assistant", "content": "so"}
    row = ProblemRow(problem_id="r", question="1?", answer="1", metadata={"solution": "x"}, reply=said)
    assert reply_of(row, "source") == said
    row = ProblemRow(problem_id="r", question="1?", answer="1", metadata={"way": "x"})
    assert [reply_of(row, "source", name)["content"] for name in ("way", "answer")] == ["x", "1"]


def test_a_step_holds_what_fits_and_an_epoch_each_document_once() -> None:
    documents = make_documents(((3, 4), (2, 9), (5, 1), (1, 2), (4, 8), (6, 6), (2, 2)))
    steps = list(islice(filled(documents, 24, seed=0), 12))
    drawn = [document for step in steps for document in step]
    for step, after in pairwise(steps):
        size = sum(map(num_tokens, step))
        assert size <= 24 < size + num_tokens(after[0])
    assert sorted(map(id, drawn[:7])) == sorted(map(id, documents))
    assert [id(one) for one in drawn[:7]] != [id(one) for one in drawn[7:14]]
