"""A server process of an encoder, whose engine runs in another process: the task is read from the folder."""

import os
import signal

import httpx
import numpy as np
from encoder_folders import TEXTS, save_encoder


def test_a_folder_of_an_encoder_is_served_without_flags_for_it(start_server, encoder_of, tmp_path) -> None:
    path = save_encoder(tmp_path)
    served = start_server(str(path), "--dtype", "float32", "--device", "cpu", "--process", "--served-model-name", "tiny")
    try:
        with httpx.Client(base_url=served.url) as client:
            reply = client.post("/v1/embeddings", json={"model": "tiny", "input": list(TEXTS)}).json()
            found = [each["embedding"] for each in reply["data"]]
            np.testing.assert_allclose(found, encoder_of("embed").encode(TEXTS), atol=1e-5)
            refused = client.post("/v1/embeddings", json={"model": "tiny", "input": list(TEXTS), "dimensions": 1000})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "dimensions"
            text = client.get("/metrics").text
            assert 'fa_serve:prompt_tokens_total{model_name="tiny"}' in text
            [card] = client.get("/v1/models").json()["data"]
            assert (card["max_model_len"], card["task"], card["input_modalities"]) == (48, "embed", ["text"])
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(20) == 0
    finally:
        served.end()
