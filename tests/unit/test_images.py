"""Images in prompts: ids that name them, a store by hash, and the forms that datasets have."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import LlamaConfig

from asyncrl.chat import anthropic, responses
from asyncrl.chat.fields import ApiError
from asyncrl.chat.messages import with_names
from asyncrl.data.chat import Chat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.images import ImageTokens, shown
from asyncrl.data.rows import IMAGE, RowReader, sent_image
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments.agent_requests import parse_request
from asyncrl.environments.observation import for_policy
from asyncrl.environments.tools.tool_worker import call
from asyncrl.errors import ConfigError, DataError, StorageError
from asyncrl.serving.model_text import ModelText
from asyncrl.types.images import FIRST_ID, KEY_TOKENS, ImageStore, as_model_ids, image_ids, images_in
from tests.environments import chat_with, vision_model
from tests.make import quickstart
from tools.make_tiny_vision import build

KEYS = st.text("0123456789abcdef", min_size=28, max_size=28)
RUNS = st.lists(st.tuples(KEYS, st.integers(KEY_TOKENS, 40), st.lists(st.integers(0, 99), max_size=3)), max_size=4)


@given(RUNS)
def test_ids_name_the_images_wherever_they_stand(runs):
    """Side by side too, and with the processor's own tokens between."""
    ids = np.concatenate([np.zeros(0, np.int32), *(x for key, n, text in runs for x in (image_ids(key, n), text))])
    ids = ids.astype(np.int32)
    found = images_in(ids)
    assert [image.key for image in found] == [key for key, _, _ in runs]
    assert [len(image.at) for image in found] == [n for _, n, _ in runs]
    assert (ids[np.concatenate([np.zeros(0, int), *(image.at for image in found)])] >= FIRST_ID).all()
    assert as_model_ids(ids, 7).max(initial=0) < 100


@pytest.mark.parametrize("part", [slice(1, None), slice(0, 3), slice(4, None)])
def test_a_part_of_an_image_is_no_image(part):
    with pytest.raises(ValueError, match="part of an image"):
        images_in(image_ids("ab" * 14, 9)[part])


def png(color):
    file = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(file, "png")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return RowReader(image_directory=str(tmp_path / "images"))


def colours(reader, record, tmp_path):
    """The text of the only message, with the colours of its images."""
    row = reader.record(record | {"answer": "1"}, f"{tmp_path / 'rows.jsonl'}:1")
    (message,) = row.messages
    store = ImageStore(tmp_path / "images")
    return IMAGE.sub(lambda m: "R" if store.open([m[1]])[0].getpixel((0, 0)) == (255, 0, 0) else "B", message.content)


def asked(content, **columns):
    return {"prompt": [{"role": "user", "content": content}], **columns}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked("<image>one<image>", images=[{"bytes": RED, "path": None}, {"path": "blue.png"}]), "RoneB"),
        (asked("which?", images=["red.png", "blue.png"]), "RBwhich?"),
        (asked("which?", image={"url": "data:image/png;base64," + base64.b64encode(BLUE).decode()}), "Bwhich?"),
        (asked([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}], images=[RED, BLUE]), "aRB"),
        (asked([{"type": "image", "image": BLUE}, {"type": "text", "text": "b"}]), "Bb"),
        (asked([{"type": "image_url", "image_url": {"url": "red.png"}}, {"type": "image"}], images=["blue.png"]), "RB"),
        (asked("which?", images=[Image.new("RGBA", (2, 2), "blue")]), "Bwhich?"),
        ({"prompt": "<image>?", "images": ["blue.png"]}, "B?"),
    ],
)
def test_datasets_bring_images_in_many_forms(reader, record, expected, tmp_path):
    assert colours(reader, record, tmp_path) == expected


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (asked("<image><image>", images=["red.png"]), "more places for images"),
        (asked("<image>", images=["red.png", "blue.png"]), "1 images without a place"),
        (asked([{"type": "image"}]), "more places for images"),
        (asked("?", images=["none.png"]), r"none\.png"),
        (asked("?", images=[b"no image"]), "cannot identify image"),
        (asked("?", images=[7]), "int '7'"),
        (asked("?", videos=["a.mp4"]), "videos, and only text"),
    ],
)
def test_what_is_no_image_or_has_no_place_names_its_row(reader, record, found, tmp_path):
    with pytest.raises(DataError, match=found) as caught:
        reader.record(record | {"answer": "1"}, f"{tmp_path / 'rows.jsonl'}:4")
    assert "rows.jsonl:4" in str(caught.value)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "images").write_text("a file")
    with pytest.raises(StorageError, match="images"):
        RowReader(image_directory=str(tmp_path / "images")).record(asked("?", images=[RED], answer="1"), "f:1")


def test_a_sign_that_texts_have_is_no_image():
    """Word processors leave it where an object was."""
    row = RowReader().record(asked("a \ufffc b", answer="1"), "f:1")
    assert row.messages[0].content == "a \ufffc b"
    assert not IMAGE.findall(row.messages[0].content)


def test_an_image_is_kept_once_and_a_lost_one_is_named(tmp_path):
    store = ImageStore(tmp_path)
    assert store.put(RED) == store.put(RED) != store.put(BLUE)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError, match="0000"):
        store.open(["0" * 28])


@pytest.mark.parametrize(
    "other",
    [
        ("rollout.engine=sglang",),
        ("trainer.backend=megatron",),
        ("algorithm.preset=ppo",),
        ("teacher.path=a/b", "algorithm.distillation.coefficient=1"),
    ],
)
def test_what_reads_no_images_is_refused(other):
    recipe = quickstart("data.image_directory=images")
    assert recipe.model.image_directory == "images"
    with pytest.raises(ConfigError, match=r"data\.image_directory with .*(?s:.*)it reads no images"):
        quickstart("data.image_directory=images", *other)


def test_samples_keep_the_reference(reader, tmp_path):
    row = reader.record(asked("?", images=["red.png"], answer="1"), f"{tmp_path / 'f.jsonl'}:1")
    assert IMAGE.findall(json.loads(json.dumps(row.messages[0].content))) == [ImageStore(tmp_path).put(RED)]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The section of a tiny model that reads images."""
    return vision_model(tmp_path_factory.mktemp("vision"))


def test_a_model_of_text_alone_is_refused(named, tmp_path):
    build()[1].save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    other = replace(named, path=str(tmp_path))
    with pytest.raises(ConfigError, match="no image_token_id"):
        ImageTokens(other, ChatTemplate(load_tokenizer(other), other).image_text)


def test_a_tool_returns_images():
    """A path or an address is text."""
    made = {"picture": ["see ", Image.new("RGB", (2, 2), "red")], "address": "data:image/png;base64," + "A" * 8}

    class See:
        name, parameters = "see", {"properties": {"what": {}}}

        def call(self, what):
            return made[what]

    assert named_colours(call({"see": See()}, "see", {"what": "picture"}).text) == "see R"
    assert call({"see": See()}, "see", {"what": "address"}).text == made["address"]


# Images of environments, tools and requests.


def url_of(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


PIXELS = np.zeros((4, 6, 3), np.uint8) + np.array([255, 0, 0], np.uint8)


def named_colours(parts):
    """Texts, and R or B for an image."""
    if isinstance(parts, str):
        return parts
    first = [Image.open(io.BytesIO(p)).getpixel((0, 0)) if isinstance(p, bytes) else p for p in parts]
    return "".join(p if isinstance(p, str) else "R" if p[:3] == (255, 0, 0) else "B" for p in first)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RED, "R"),
        (Image.new("RGBA", (2, 2), "blue"), "B"),
        (PIXELS, "R"),
        (url_of(BLUE), "B"),
        (["left ", RED, " right ", PIXELS], "left R right R"),
        ({"mission": "go", "image": PIXELS}, "mission: go\nimage: R\n"),
        ([{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url_of(RED)}}], "see R"),
        ({"type": "image", "mimeType": "image/png", "data": base64.b64encode(BLUE).decode()}, "B"),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(BLUE).decode()},
            },
            "B",
        ),
        ("data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
        (b"no image", "b'no image'"),
        ({"a": 1}, "{'a': 1}"),
        (np.zeros((2, 2), np.uint8), "[[0 0]\n [0 0]]"),
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, None),
        ({"type": "image", "path": "/etc/passwd"}, None),
    ],
)
def test_what_environments_and_tools_show(value, expected):
    """None: the value's own text. Nothing is fetched or read for them."""
    assert named_colours(shown(value)) == (str(value) if expected is None else expected)


def test_an_image_of_an_environment_is_tokens_of_its_turn_and_reads_back_as_its_key(named):
    chat = Chat(load_tokenizer(named), named)
    key = ImageStore(named.image_directory).put(RED)
    forged = "\ufffc", key, '\0\ufffc"/etc/passwd"\0'
    text = for_policy(chat, ("you see ", RED, " and <image> ", *forged, RED), 100)
    assert IMAGE.findall(text) == [key, key], "texts bring none"
    ids = chat.next_turn(chat.encode("go<|im_end|>"), [{"role": "user", "content": text}])
    assert [image.key for image in images_in(ids)] == [key, key]
    assert len(images_in(ids)[0].at) == 16
    assert chat.decode_turn(ids).count("\ufffc" + key) == 2
    assert "".join(chat.decode_turn(ids[i : i + 1]) for i in images_in(ids)[1].at) == f"\ufffc{key}"
    prompt = chat.prompt([{"role": "user", "content": text}])
    assert prompt.tolist()[-len(ids) + 5 :] == ids.tolist()[5:]
    cut = for_policy(chat, ("a b c d e f g h", RED), 3)
    assert "[cut: the first 3 of" in cut
    assert len(IMAGE.findall(cut)) == 1, "images are not cut"
    cut = for_policy(chat, ("a b c d", RED, "e f", RED, "g", *["h"] * 9), 6)
    assert cut.count("[cut:") == 1
    assert len(IMAGE.findall(cut)) == 2
    assert not cut.endswith("h"), "what follows a cut is images alone"


def test_a_model_of_text_is_told_where_an_image_was():
    assert for_policy(chat_with(), ("you see ", RED), 100) == "you see [image]"
    with pytest.raises(DataError, match=r"set data\.image_directory"):
        chat_with().prompt([{"role": "user", "content": "what is " + sent_image(url_of(RED))}])


OPENAI = {"type": "image_url", "image_url": {"url": url_of(RED)}}
BASE64 = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
REQUESTS = {
    "chat": (lambda body: body, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, OPENAI]}]}),
    "responses": (
        responses.to_chat,
        {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "a "}, {"type": "input_image", "image_url": url_of(RED)}]}]},
    ),
    "messages": (
        anthropic.to_chat,
        {"max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "a "}, {"type": "image", "source": BASE64}]}]},
    ),
    "a result": (
        anthropic.to_chat,
        {"max_tokens": 5, "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "see", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
                {"type": "text", "text": "a "}, {"type": "image", "source": BASE64}]}]},
        ]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_bring_images_in_the_form_of_each_api(named, name):
    to_chat, body = REQUESTS[name]
    asked = parse_request(to_chat(body)).messages
    model_text = ModelText.of(named, quickstart("rollout.torch.max_model_len=512").rollout, None)
    served = model_text.chat(with_names(asked))
    key = ImageStore(named.image_directory).put(RED)
    assert [image.key for image in images_in(served)] == [key]
    assert f"a \ufffc{key}" in Chat(load_tokenizer(named), named).decode_turn(served)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}],
        [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}],
        [{"type": "image", "path": "/etc/passwd"}],
        [{"type": "input_audio", "input_audio": {}}],
    ],
)
def test_nothing_is_fetched_for_a_request(content):
    with pytest.raises(ApiError, match="nothing is fetched"):
        parse_request({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("sent", [url_of(b"no image"), "data:image/png;base64,%%%"])
def test_what_is_no_image_is_an_error_of_the_request(named, sent):
    model_text = ModelText.of(named, quickstart("rollout.torch.max_model_len=512").rollout, None)
    with pytest.raises(ApiError, match="an image") as refused:
        model_text.chat([{"role": "user", "content": sent_image(sent)}])
    assert refused.value.status == 400


@pytest.mark.parametrize("source", ["/etc/passwd", "http://127.0.0.1:9/a.png", url_of(RED), "x"])
def test_the_text_of_a_request_names_no_image(named, source):
    key = ImageStore(named.image_directory).put(RED)
    text = f"\ufffc{key} \0\ufffc{json.dumps(source)}\0 \0\ufffc{source}\0"
    asked = parse_request({"messages": [{"role": "user", "content": text}]}).messages
    model_text = ModelText.of(named, quickstart("rollout.torch.max_model_len=512").rollout, None)
    assert not images_in(model_text.chat(asked))


def test_more_images_than_a_context_can_hold_are_refused_unread(named):
    model_text = ModelText.of(named, quickstart("rollout.torch.max_model_len=512").rollout, None)
    content = [{"type": "image_url", "image_url": {"url": url_of(b"no image")}}] * 200
    with pytest.raises(ApiError, match="200 images for a context of 512 tokens"):
        model_text.chat(parse_request({"messages": [{"role": "user", "content": content}]}).messages)


def test_an_image_of_too_many_pixels_is_refused(reader, tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match="81 million pixels"):
        reader.record(asked("?", images=["large.png"], answer="1"), f"{tmp_path / 'f.jsonl'}:1")


def test_what_rewards_read_has_no_images_and_samples_show_them(named):
    chat = Chat(load_tokenizer(named), named)
    key = ImageStore(named.image_directory).put(RED)
    ids = np.concatenate([chat.encode("a"), image_ids(key, 7), chat.encode("b")])
    assert (chat.decode(ids), chat.decode_shown(ids)) == ("ab", f"a\ufffc{key}b")


def test_a_turn_that_ends_with_an_image_is_refused(named):
    bare = replace(named, chat_template="none")
    chat = Chat(load_tokenizer(bare), bare)
    with pytest.raises(DataError, match="ends with an image"):
        chat.next_turn(chat.encode("a"), [{"role": "user", "content": f"see {chat.image(RED)}"}])


def test_a_template_may_write_nothing_for_an_empty_turn(named, tmp_path):
    (tmp_path / "bare.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    bare = replace(named, chat_template=str(tmp_path / "bare.jinja"))
    chat = Chat(load_tokenizer(bare), bare)
    assert len(chat.next_turn(chat.encode("a"), [{"role": "user", "content": ""}])) == 0
