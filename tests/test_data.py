"""Data: the same batch from the same config, anywhere and at any time; documents never leak; errors that help."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from jlaqat.data import (
    DataConfig,
    DataConfigError,
    TokenHash,
    check_model_sizes,
    data_sizes,
    loss_kind,
    make_dataset,
    provenance,
    source_hash,
    token_hash,
)
from jlaqat.data_synthetic import permutation_tables
from jlaqat.data_text import RowSource, held_out, stdlib_files

SYNTHETIC = {
    "regression": dict(seq_len=24, input_dim=4),
    "recall": dict(seq_len=40, num_pairs=6, num_rounds=2, num_values=5),
    "state_tracking": dict(seq_len=24),
    "slow_writes": dict(seq_len=24, num_pairs=3, noise=1.0),
}


@pytest.fixture
def folder(tmp_path):
    """Twelve text files whose bytes name the file: file i repeats the byte 65 + i, 7 + 5·i times."""
    for i in range(12):
        (tmp_path / f"part{i:02d}.txt").write_bytes(bytes([65 + i]) * (7 + 5 * i))
    return tmp_path


def take(config, count, **shard):
    batches = iter(make_dataset(config, **shard))
    return [next(batches) for _ in range(count)]


def configs(folder):
    made = {task: DataConfig(task=task, batch_size=4, seed=5, **kw) for task, kw in SYNTHETIC.items()}
    text = DataConfig(task="text", paths=(str(folder),), batch_size=4, seq_len=16, seed=5)
    return {**made, "text": text, "packed": dataclasses.replace(text, packing=True, max_documents=4)}


CASES = [*SYNTHETIC, "text", "packed"]


# ------------------------------------------------------------------ determinism, resume, shards


@pytest.mark.parametrize("case", CASES)
def test_batches_are_a_function_of_the_config(case, folder):
    config = configs(folder)[case]
    first, again = take(config, 3), take(dataclasses.replace(config, num_threads=0), 3)
    assert token_hash(first) == token_hash(again)
    assert token_hash(first) != token_hash(take(dataclasses.replace(config, seed=6), 3))
    assert token_hash(first) != token_hash(take(dataclasses.replace(config, split="eval", seq_len=config.seq_len), 3))
    assert token_hash(first[:1]) != token_hash(first[1:2])
    for batch in first:
        assert batch["weights"].dtype == np.float32
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
        assert batch["inputs"].shape[:2] == batch["targets"].shape[:2] == batch["weights"].shape
        if loss_kind(config) == "cross_entropy":
            assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
            assert min(batch["inputs"].min(), batch["targets"].min()) >= 0
            assert max(batch["inputs"].max(), batch["targets"].max()) < data_sizes(config).vocab_size
        else:
            assert batch["inputs"].dtype == batch["targets"].dtype == np.float32
            assert batch["inputs"].shape[2:] == (data_sizes(config).input_size,)
            assert batch["targets"].shape[2:] == (data_sizes(config).output_size,)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_threads", [0, 1])
def test_iterator_state_restores_the_next_batch(case, num_threads, folder):
    config = dataclasses.replace(configs(folder)[case], num_threads=num_threads)
    batches = iter(make_dataset(config))
    for _ in range(7):  # past an epoch of the small folder
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches) for _ in range(3)]
    batches.set_state(state)  # the same iterator, wound back
    assert token_hash([next(batches) for _ in range(3)]) == token_hash(expected)
    fresh = iter(make_dataset(config))  # another process, after a restart
    fresh.set_state(state)
    assert token_hash([next(fresh) for _ in range(3)]) == token_hash(expected)


@pytest.mark.parametrize("case", CASES)
def test_processes_share_a_global_batch(case, folder):
    config = configs(folder)[case]
    whole = take(config, 2)
    shards = [take(config, 2, process_index=p, process_count=2) for p in range(2)]
    axis = 1 if config.packing else 0
    for i, batch in enumerate(whole):
        for name in ("inputs", "targets", "weights"):
            joined = np.concatenate([shard[i][name] for shard in shards], axis)
            np.testing.assert_array_equal(joined, batch[name])
        if config.packing:
            half = 2 * config.seq_len
            joined = np.concatenate([shards[0][i]["cu_seqlens"], shards[1][i]["cu_seqlens"][1:] + half])
            np.testing.assert_array_equal(joined, batch["cu_seqlens"])


# ------------------------------------------------------------------ what the tasks hold


def test_regression_is_linear_and_shows_the_answer_one_token_late():
    config = DataConfig(task="regression", batch_size=64, seq_len=24, input_dim=4)
    [batch] = take(config, 1)
    past_x, past_y, x = np.split(batch["inputs"], [4, 5], axis=-1)
    y = batch["targets"]
    np.testing.assert_array_equal(past_x[:, 1:], x[:, :-1])
    np.testing.assert_array_equal(past_y[:, 1:], y[:, :-1])
    assert not past_x[:, 0].any() and not past_y[:, 0].any()
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 2.0, rtol=1e-5)
    for row in range(3):  # one w explains all 24 answers
        w, *_ = np.linalg.lstsq(x[row], y[row], rcond=None)
        np.testing.assert_allclose(x[row] @ w, y[row], atol=1e-5)
    assert 0.7 < y.var() < 1.3


def test_recall_asks_for_the_last_binding():
    config = DataConfig(task="recall", batch_size=3, seq_len=40, num_pairs=6, num_rounds=2, num_values=5)
    [batch] = take(config, 1)
    changed = 0
    for tokens, targets, weights in zip(batch["inputs"], batch["targets"], batch["weights"]):
        memory = {}
        for t in range(0, 24, 2):
            changed += memory.get(tokens[t], tokens[t + 1]) != tokens[t + 1]
            memory[tokens[t]] = tokens[t + 1]
        assert sorted(memory) == list(range(6))
        assert sorted(tokens[24:36:2]) == list(range(6))
        assert all(targets[t + 1] == memory[tokens[t]] for t in range(24, 36, 2))
        assert set(tokens[25:36:2]) == {11} == set(tokens[36:])
        np.testing.assert_array_equal(np.flatnonzero(weights), np.arange(25, 36, 2))
    assert changed > 0


@pytest.mark.parametrize(
    "num_items,moves,num_moves,classes", [(2, "swaps", 2, 2), (3, "swaps", 4, 6), (4, "all", 24, 24)]
)
def test_state_tracking_follows_a_group(num_items, moves, num_moves, classes):
    table, ids = permutation_tables(num_items, moves)
    assert table.shape == (classes, num_moves)
    assert all(sorted(column) == list(range(classes)) for column in table.T)  # a move permutes the classes
    np.testing.assert_array_equal(table[0], ids)  # from the identity, a move leads to itself
    if moves == "swaps":
        assert all(table[table[c, m], m] == c for c in range(classes) for m in range(num_moves))  # its own inverse
    config = DataConfig(task="state_tracking", batch_size=2, seq_len=30, num_items=num_items, moves=moves)
    [batch] = take(config, 1)
    for tokens, targets in zip(batch["inputs"], batch["targets"]):
        arrangement = list(range(num_items))  # an independent walk: swap the items themselves
        walk = sorted(permutation_list(num_items))
        for move, target in zip(tokens, targets):
            arrangement = [arrangement[i] for i in walk[ids[move]]]
            assert walk[target] == tuple(arrangement)


def permutation_list(n):
    return [()] if n == 0 else [(*p[:i], n - 1, *p[i:]) for p in permutation_list(n - 1) for i in range(n)]


def test_slow_writes_samples_scatter_around_their_target():
    config = DataConfig(task="slow_writes", batch_size=64, seq_len=50, num_pairs=3, noise=2.0)
    [batch] = take(config, 1)
    keys, samples = batch["inputs"][..., :3], batch["inputs"][..., 3]
    assert (keys.sum(-1) == 1).all()
    assert np.std(samples - batch["targets"][..., 0]) == pytest.approx(2.0, rel=0.1)
    for row in range(3):  # one mean per key
        assert len(np.unique(batch["targets"][row])) == len(np.unique(keys[row].argmax(-1)))


def test_tail_weighs_the_end_alone():
    whole = DataConfig(task="regression", batch_size=2, seq_len=20, input_dim=3)
    [all_of_it], [tail] = take(whole, 1), take(dataclasses.replace(whole, tail=0.25), 1)
    assert all_of_it["weights"].all()
    np.testing.assert_array_equal(tail["weights"][0], np.arange(20) >= 15)
    np.testing.assert_array_equal(tail["inputs"], all_of_it["inputs"])


# ------------------------------------------------------------------ files


def test_packing_never_mixes_documents(folder):
    config = DataConfig(task="text", paths=(str(folder),), batch_size=2, seq_len=32, packing=True, max_documents=4)
    seen: dict[int, int] = {}
    epoch = len(RowSource(config))
    for batch in take(config, epoch // 2):
        bounds = batch["cu_seqlens"]
        assert bounds.dtype == np.int32 and bounds.shape == (2 * 4 + 1,)
        assert batch["inputs"].shape == (1, 64)
        assert bounds[0] == 0 and bounds[-1] == 64 and (np.diff(bounds) >= 0).all()
        assert 32 in bounds  # rows never run into each other
        inputs, targets, weights = (batch[n][0] for n in ("inputs", "targets", "weights"))
        for a, b in zip(bounds, bounds[1:]):
            letters = set(inputs[a:b])
            assert len(letters) <= 1, "two documents in one sequence"
            asked = weights[a:b] > 0
            assert set(targets[a:b][asked]) <= letters, "a target from another document"
            if letters and letters != {0}:
                seen[letters.pop()] = seen.get(inputs[a], 0) + int(asked.sum())
            else:
                assert not asked.any()
    # Every training document gave each of its next-byte targets once an epoch (rows left over after batching aside).
    names = [f"part{i:02d}.txt" for i in range(12)]
    train = [i for i in range(12) if i not in held_out(names, 0.1)]
    assert set(seen) <= {65 + i for i in train}
    if epoch % 2 == 0:
        assert seen == {65 + i: 7 + 5 * i - 1 for i in train}
    source = RowSource(config)
    total = sum(float(source[i]["weights"].sum()) for i in range(epoch))
    assert total == sum(7 + 5 * i - 1 for i in train)


def test_windows_cover_each_document_once(folder):
    config = DataConfig(task="text", paths=(str(folder),), batch_size=2, seq_len=16)
    source = RowSource(config)
    rows = [source[i] for i in range(len(source))]
    train = [i for i in range(12) if i not in held_out([f"part{j:02d}.txt" for j in range(12)], 0.1)]
    asked = {i: sum(int(r["weights"].sum()) for r in rows if r["inputs"][0] == 65 + i) for i in train}
    assert asked == {i: 7 + 5 * i - 1 for i in train}
    for row in rows:
        assert set(row["targets"][row["weights"] > 0]) == {row["inputs"][0]}
        assert not row["inputs"][int(row["weights"].sum()) + 1 :].any()  # padding after the last token


def test_targets_are_the_next_bytes_across_windows(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    config = DataConfig(task="text", paths=(str(tmp_path / "a.txt"),), batch_size=1, seq_len=30)
    source = RowSource(config)
    got = np.concatenate([source[i]["targets"][source[i]["weights"] > 0] for i in range(len(source))])
    np.testing.assert_array_equal(got, np.arange(1, 180))  # the last tenth is held out
    held = RowSource(dataclasses.replace(config, split="eval", seq_len=20))
    np.testing.assert_array_equal(held[0]["inputs"], np.arange(180, 200))


def test_split_by_file_is_disjoint_and_stable():
    names = [f"f{i}" for i in range(50)]
    kept = held_out(names, 0.1)
    assert len(kept) == 5
    assert {names[i] for i in kept} <= {["z0", *names][i] for i in held_out(["z0", *names], 0.12)}
    assert len(held_out(["a", "b"], 0.0)) == 1 and len(held_out(["a", "b"], 0.9)) == 1


def test_stdlib_is_there_and_its_hash_is_recorded():
    files = stdlib_files()
    assert len(files) > 100 and files == sorted(files) and any(name == "json/decoder.py" for name, _ in files)
    assert not any("site-packages" in name or name.startswith("test/") for name, _ in files)
    config = DataConfig(task="text", paths=("stdlib",), batch_size=2, seq_len=64)
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    record = provenance(config)
    assert record["sha256"] == digest.hexdigest() == source_hash(config)
    assert record["files"] == len(files) and record["python"]
    [batch] = take(config, 1)
    text = bytes(batch["inputs"].astype(np.uint8).tobytes())
    assert sum(b in text for b in (b" ", b"e", b"\n")) == 3


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_files_and_separators(tmp_path, kind):
    tokens = np.array([5, 6, 7, 1, 8, 9, 1, 3, 3, 3, 3, 3], np.uint16)
    path = tmp_path / f"tokens.{kind}"
    np.save(path, tokens) if kind == "npy" else tokens.tofile(path)
    config = DataConfig(
        task="tokens",
        paths=(str(path),),
        vocab_size=10,
        separator=1,
        batch_size=1,
        seq_len=8,
        packing=True,
        eval_fraction=0.01,
    )
    source = RowSource(config)
    assert [d.tokens.tolist() for d in source.documents] == [[5, 6, 7, 1], [8, 9, 1], [3, 3, 3, 3]]
    for i in range(len(source)):
        row = source[i]
        for a, b in zip(row["cu_seqlens"], row["cu_seqlens"][1:]):
            assert row["weights"][a:b].sum() in (
                0,
                b - a - 1,
                b - a,
            )  # b − a only where a document goes on in the next row


def test_hashes_see_every_change(folder):
    config = DataConfig(task="text", paths=(str(folder),), batch_size=2, seq_len=16)
    before = source_hash(config)
    assert before == source_hash(config)
    (folder / "part03.txt").write_bytes(b"D" * 22)
    assert before == source_hash(config)  # the same content
    (folder / "part03.txt").write_bytes(b"d" * 22)
    changed = source_hash(config)
    (folder / "part03.txt").rename(folder / "part03b.txt")
    assert len({before, changed, source_hash(config)}) == 3
    synthetic = DataConfig(seed=1)
    assert source_hash(synthetic) == source_hash(dataclasses.replace(synthetic, num_threads=4))
    assert source_hash(synthetic) != source_hash(dataclasses.replace(synthetic, input_dim=8))
    batch = {"inputs": np.zeros((1, 2), np.int32), "weights": np.array([[1.0, 0.0]], np.float32)}
    counter = TokenHash()
    counter.update(batch)
    assert counter.tokens == 1
    other = {**batch, "inputs": np.zeros((2, 1), np.int32)}
    assert token_hash([batch]) != token_hash([other]) != token_hash([{**batch, "inputs": np.zeros((1, 2), np.int64)}])


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "given,words",
    [
        (dict(task="recal"), ["task='recal'", "'recall'"]),
        (dict(split="test"), ["split='test'", "'eval'"]),
        (dict(task="state_tracking", moves="flips"), ["moves='flips'", "'swaps'"]),
        (dict(batch_size=0), ["batch_size=0", "from 1"]),
        (dict(seq_len=0), ["seq_len=0"]),
        (dict(noise=-1.0), ["noise=-1.0"]),
        (dict(task="state_tracking", num_items=7), ["num_items=7", "from 2 to 6"]),
        (dict(task="text"), ["paths is empty", "stdlib"]),
        (dict(task="text", paths=("stdlib",), vocab_size=50), ["vocab_size=50", "256"]),
        (dict(task="tokens", paths=("stdlib",)), ["task='text'"]),
        (dict(tail=1.5), ["tail=1.5", "from 0 to 1"]),
        (dict(task="text", paths=("stdlib",), tail=0.5), ["tail=0.5", "synthetic"]),
        (dict(packing=True), ["packing=True", "'text' or 'tokens'"]),
        (dict(task="tokens", paths=("x",), token_dtype="float32"), ["token_dtype='float32'", "uint16"]),
        (dict(task="tokens", paths=("x",), token_dtype="nonsense"), ["token_dtype='nonsense'", "uint16"]),
        (dict(task="recall", seq_len=191), ["seq_len=191 is too short", "192", "num_pairs"]),
    ],
)
def test_bad_settings_say_what_to_do(given, words):
    with pytest.raises(DataConfigError) as error:
        DataConfig(**given)
    assert all(word in str(error.value) for word in words), str(error.value)


def files_config(*paths, **fields):
    return DataConfig(**{"task": "text", "paths": tuple(map(str, paths)), "seq_len": 8, "batch_size": 1, **fields})


def test_bad_files_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*no such file.*working directory.*stdlib"):
        make_dataset(files_config(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        make_dataset(files_config(tmp_path / "*.md"))
    with pytest.raises(FileNotFoundError, match="matches pattern"):
        make_dataset(files_config(tmp_path))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataConfigError, match="1 files found hold no tokens"):
        make_dataset(files_config(tmp_path))
    (tmp_path / "short.txt").write_bytes(b"ab" * 50)
    with pytest.raises(DataConfigError, match="seq_len=100 is too long.* 90 tokens in 1 documents.*at most 90"):
        make_dataset(files_config(tmp_path, seq_len=100))
    with pytest.raises(DataConfigError, match="seq_len=11 is too long: the eval split"):
        make_dataset(files_config(tmp_path, seq_len=11, split="eval"))
    with pytest.raises(DataConfigError, match=r"unknown token file type '.txt'.*\.npy or \.bin"):
        make_dataset(files_config(tmp_path / "short.txt", task="tokens"))
    np.save(tmp_path / "flat.npy", np.zeros((4, 4), np.int32))
    with pytest.raises(DataConfigError, match=r"shape \(4, 4\); a token file holds a 1-D integer array"):
        make_dataset(files_config(tmp_path / "flat.npy", task="tokens"))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataConfigError, match=r"3 bytes is no whole number of uint16 tokens.*token_dtype"):
        make_dataset(files_config(tmp_path / "odd.bin", task="tokens"))
    np.save(tmp_path / "ids.npy", np.arange(50))
    with pytest.raises(
        DataConfigError, match=r"token id 30 at position 30 is outside the vocabulary \[0, 30\).*vocab_size"
    ):
        make_dataset(files_config(tmp_path / "ids.npy", task="tokens", vocab_size=30))
    np.save(tmp_path / "negative.npy", np.array([1, 2, -1, 4] * 10))
    with pytest.raises(DataConfigError, match="token id -1 at position 2"):
        make_dataset(files_config(tmp_path / "negative.npy", task="tokens"))


def test_models_that_do_not_fit_are_refused():
    check_model_sizes(DataConfig(input_dim=4), input_size=9, output_size=1)
    check_model_sizes(DataConfig(task="state_tracking"), vocab_size=8)
    with pytest.raises(DataConfigError, match="input_size=8.*set model.input_size=9 and model.output_size=1"):
        check_model_sizes(DataConfig(input_dim=4), input_size=8, output_size=1)
    with pytest.raises(DataConfigError, match="vocab_size=5 does not fit.*0 to 5; set model.vocab_size=6"):
        check_model_sizes(DataConfig(task="state_tracking"), vocab_size=5)
    with pytest.raises(DataConfigError, match="vocab_size=None"):
        check_model_sizes(DataConfig(task="text", paths=("stdlib",)), input_size=1, output_size=1)


def test_processes_must_divide_the_batch():
    with pytest.raises(DataConfigError, match="batch_size=16 does not divide over process_count=3"):
        make_dataset(DataConfig(), process_count=3)
    with pytest.raises(DataConfigError, match="process_index=2 is out of range.*give 0 to 1"):
        make_dataset(DataConfig(), process_index=2, process_count=2)
