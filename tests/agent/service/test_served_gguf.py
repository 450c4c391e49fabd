"""A GGUF file as a language model of a served line."""

import httpx
import torch

from experts.llm.files.program import read_program
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.gguf.words import byte_level_words
from tests.experts.llm.gguf.writing import tiny_model, with_tensors_of, write_model

ASKED = {"messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 12, "temperature": 0}


def test_chat_with_a_gguf_file_is_what_transformers_writes_of_it(text_line, tmp_path):
    words = byte_level_words()
    model = tiny_model("qwen2", vocab_size=len(words["tokenizer.ggml.tokens"]))
    path = write_model(tmp_path / "m.gguf", model, "Q8_0", tokenizer=words)
    text_line.document["experts"]["llm/code"] = {"architecture": "llm", "weights": str(path), "precision": "fp32"}
    text_line.document["api"] = {"grpc": [], "http": ["127.0.0.1:0"]}
    with text_line.served() as service, httpx.Client(base_url=f"http://{service.web.addresses[0]}/v1") as client:
        listed = {one["id"]: one for one in client.get("/models").json()["data"]}
        answer = client.post("/chat/completions", json={"model": "llm/code", **ASKED}).json()["choices"][0]
    assert listed["llm/code"]["context_length"] == model.config.max_position_embeddings
    ours = TextModel.of(read_program(path, "llm/code"), "llm/code")
    ids = torch.tensor([ours.chat_prompt_of(ASKED["messages"])])
    made = with_tensors_of(path, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=list(ours.stop_tokens),
    )
    assert answer["message"]["content"] == ours.decode(made[0, ids.shape[1] :].tolist())
    assert len(answer["message"]["content"]) > 1
