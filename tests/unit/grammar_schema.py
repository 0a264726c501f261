#!/usr/bin/env python3
"""JSON schemas: 1,000 random ones (100 with TANDEM_TEST_SHORT), each with instances that keep to
it. Random outputs of our automaton must pass the validator (python3-jsonschema); the instances,
whose properties stand in the schema's order, must be taken by the automaton.

grammar_schema.py GRAMMAR_WALK
"""
import json
import os
import random
import subprocess
import sys
from decimal import Decimal

try:
    import jsonschema
except ImportError:
    print("skipped: python3-jsonschema is not installed (scripts/install-deps)")
    sys.exit(77)

COMPACT = (",", ":")
WORDS = ["a", "b", "name", "é", 'q"', "x\\y", "", "a b", "\U0001f600"]


def scalar(rng):
    return rng.choice([None, True, False, 0, -7, 12, 3.5, "a", "bc", 'say "no"', "é"])


def any_value(rng, depth):
    if depth <= 0 or rng.random() < 0.6:
        return scalar(rng)
    if rng.random() < 0.5:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {w: any_value(rng, depth - 1) for w in rng.sample(WORDS, rng.randrange(3))}


def string_of(rng, lo, hi):
    return "".join(rng.choice('abé"\\/ \n\U0001f600') for _ in range(rng.randint(lo, hi)))


def make_string(rng, depth):
    kind = rng.randrange(4)
    if kind == 0:
        lo, hi = sorted(rng.randrange(7) for _ in range(2))
        return {"type": "string", "minLength": lo, "maxLength": hi}, lambda: string_of(rng, lo, hi)
    if kind == 1:
        pattern, texts = rng.choice([
            ("^[a-f]{2,3}-\\d+$", ["ab-1", "fff-042"]),
            ("b+", ["b", "abba", "xbx"]),
            ("^(x|y\"z)$", ["x", 'y"z']),
            ("^[^a]*$", ["", "bcd", "é"]),
            ("\\\\", ["\\", "a\\b"]),
            ("a$|^b", ["ba", "a", "b", "bq"]),
        ])
        return {"type": "string", "pattern": pattern}, lambda: rng.choice(texts)
    if kind == 2:
        name, texts = rng.choice([("date", ["2024-02-28"]), ("ipv4", ["1.2.3.4", "255.0.10.99"]),
                                  ("uuid", ["01234567-89ab-cdef-0123-456789abcdef"])])
        return {"type": "string", "format": name}, lambda: rng.choice(texts)
    return {"type": "string"}, lambda: string_of(rng, 0, 5)


def make_integer(rng, depth):
    lo, hi = sorted(rng.randint(-10 ** rng.randrange(1, 6), 10 ** rng.randrange(1, 6))
                    for _ in range(2))
    schema = {"type": "integer"}
    if rng.random() < 0.5:
        schema["minimum"] = lo
    if rng.random() < 0.5:
        schema["maximum"] = hi
    if rng.random() < 0.2 and hi - lo > 3:
        schema["exclusiveMinimum"], schema["exclusiveMaximum"] = lo, hi
        return schema, lambda: rng.randint(lo + 1, hi - 1)
    return schema, lambda: rng.randint(lo, hi)


def make_number(rng, depth):
    """Bounds as decimals of a few digits, as people write them, or with all of a double's."""
    scale = 10.0 ** rng.randrange(-6, 9)
    lo, hi = sorted(rng.uniform(-scale, scale) for _ in range(2))
    if rng.random() < 0.7:
        n = rng.randrange(0, 9)
        lo, hi = round(lo, n), round(hi, n)
    if rng.random() < 0.2:
        lo = 0
        hi = max(hi, scale)
    low, high, schema = "minimum", "maximum", {"type": "number"}
    if rng.random() < 0.3 and hi - lo > 1e-9:
        low = "exclusiveMinimum"
    if rng.random() < 0.3 and hi - lo > 1e-9:
        high = "exclusiveMaximum"
    if rng.random() < 0.8:
        schema[low] = lo
    if rng.random() < 0.8 or len(schema) == 1:
        schema[high] = hi

    def instance():  # 12 digits: those that are written without an exponent are ours
        for x in (rng.uniform(lo, hi), (lo + hi) / 2, lo, hi):
            x = float(f"{x:.12g}")
            inside = lo < x < hi or (x == lo and low == "minimum") or (
                x == hi and high == "maximum")
            if inside and "e" not in json.dumps(x) and len(json.dumps(x).split(".")[1]) <= 16:
                return int(x) if x == int(x) else x
        return jsonschema
    value = instance()
    if value is jsonschema:
        return make_number(rng, depth)
    return schema, lambda: value


def make_multiple(rng, depth):
    step = rng.choice(["1", "2", "3", "7", "10", "25", "60", "0.5", "0.01", "0.125", "1.5"])
    step = Decimal(step)
    lo, hi = sorted(rng.randrange(-10 ** 4, 10 ** 4) for _ in range(2))
    kind = "integer" if step == int(step) and rng.random() < 0.5 else "number"
    schema = {"type": kind, "multipleOf": float(step) if rng.random() < 0.5 else
              int(step) if step == int(step) else float(step)}
    if rng.random() < 0.7:
        schema["minimum"] = float(lo * step)
    if rng.random() < 0.7:
        schema["exclusiveMaximum"] = float(hi * step + step)

    def instance():
        x = rng.randint(lo, hi) * step
        return int(x) if x == int(x) else float(x)
    return schema, instance


def multiple_of(validator, step, instance, schema):
    """In decimals: by doubles 0.07 is no multiple of 0.01."""
    if isinstance(instance, (int, float)) and not isinstance(instance, bool):
        if Decimal(str(instance)) % Decimal(str(step)):
            yield jsonschema.ValidationError(f"{instance} is no multiple of {step}")


def make_array(rng, depth):
    lo, hi = sorted(rng.randrange(5) for _ in range(2))
    schema, items, prefix = {"type": "array", "minItems": lo, "maxItems": hi}, None, []
    if rng.random() < 0.6:
        schema["items"], items = make(rng, depth - 1)
    if rng.random() < 0.4:
        made = [make(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
        schema["prefixItems"], prefix = [s for s, _ in made], [g for _, g in made]
    if rng.random() < 0.3:
        del schema["maxItems"]

    def instance():
        return [prefix[i]() if i < len(prefix) else items() if items else any_value(rng, 1)
                for i in range(rng.randint(lo, hi))]
    return schema, instance


def make_object(rng, depth):
    names = rng.sample(WORDS, rng.randrange(5))
    made = {n: make(rng, depth - 1) for n in names}
    required = [n for n in names if rng.random() < 0.5]
    schema = {"type": "object", "properties": {n: s for n, (s, _) in made.items()}}
    if required or rng.random() < 0.5:
        schema["required"] = required
    extra, more = rng.random(), None
    if extra < 0.3:
        schema["additionalProperties"] = False
    elif extra < 0.5:
        schema["additionalProperties"], more = make(rng, depth - 1)

    def instance():
        out = {n: g() for n, (_, g) in made.items() if n in required or rng.random() < 0.5}
        if more:
            for n in ["", "nam", "names", "ab", "zé"][:rng.randrange(4)]:
                if n not in made:
                    out[n] = more()
        return out
    return schema, instance


def make_values(rng, depth):
    values = [any_value(rng, 1) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.3:
        return {"const": values[0]}, lambda: values[0]
    return {"enum": values}, lambda: rng.choice(values)


def make_any_of(rng, depth):
    made = [make(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"anyOf": [s for s, _ in made]}, lambda: rng.choice(made)[1]()


def make_all_of(rng, depth):
    schema, instance = make_object(rng, depth)
    while "additionalProperties" in schema:
        schema, instance = make_object(rng, depth)
    names = list(schema["properties"])
    half = {"type": "object", "required": [n for n in schema.pop("required", []) if n in names]}
    return {"allOf": [schema, half], "description": "both"}, instance


def make_types(rng, depth):
    return ({"type": ["integer", "null", "boolean"], "title": "t"},
            lambda: rng.choice([None, True, 5, -3]))


def make(rng, depth):
    leaf = [make_string, make_integer, make_number, make_multiple, make_values, make_types,
            lambda r, d: ({"type": "boolean"}, lambda: r.random() < 0.5),
            lambda r, d: ({"type": "number"}, lambda: r.choice([0, -1.5, 2e10, 0.25]))]
    inner = [make_array, make_object, make_object, make_any_of, make_all_of]
    return rng.choice(leaf if depth <= 0 else leaf + inner * 2)(rng, depth)


def make_recursive(rng):
    leaf, instance = make(rng, 1)
    schema = {"$defs": {"tree": {"type": "object", "properties": {
        "leaf": leaf, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["leaf"], "additionalProperties": False}}, "$ref": "#/$defs/tree"}

    def tree(depth=3):
        out = {"leaf": instance()}
        if depth and rng.random() < 0.7:
            out["kids"] = [tree(depth - 1) for _ in range(rng.randrange(3))]
        return out
    return schema, tree


def main():
    seed = int(os.environ.get("SEED", "1"))
    n = 100 if os.environ.get("TANDEM_TEST_SHORT") else 1000
    rng = random.Random(seed)
    cases = []
    for i in range(n):
        schema, instance = make_recursive(rng) if i % 8 == 0 else make(rng, rng.randrange(4))
        texts = [json.dumps(instance(), ensure_ascii=False, separators=COMPACT if k % 2 else None)
                 for k in range(4)]
        cases.append({"schema": json.dumps(schema), "texts": texts})
    text = "".join(json.dumps(c) + "\n" for c in cases)
    out = subprocess.run([sys.argv[1], str(seed), "4"], input=text, stdout=subprocess.PIPE,
                         text=True, check=True, timeout=300).stdout.splitlines()
    assert len(out) == n, f"{len(out)} answers to {n} schemas"
    n_outputs = n_instances = 0
    validator_class = jsonschema.Draft202012Validator
    decimal_class = jsonschema.validators.extend(validator_class, {"multipleOf": multiple_of})
    for case, line in zip(cases, out):
        answer, schema = json.loads(line), case["schema"]
        assert "error" not in answer, f"SEED={seed}: {schema}: {answer['error']}"
        validator = decimal_class(json.loads(schema))
        for text in case["texts"]:  # the generator's own promise
            validator.validate(json.loads(text))
        for output in answer["outputs"]:
            try:
                validator.validate(json.loads(output))
            except (ValueError, jsonschema.ValidationError) as why:
                sys.exit(f"SEED={seed}: {schema} made {output!r}: {why}")
            n_outputs += 1
        for text, taken in zip(case["texts"], answer["taken"]):
            if not taken:
                sys.exit(f"SEED={seed}: {schema} does not take {text}")
        n_instances += len(answer["taken"])
    print(f"{n} schemas, {n_outputs} outputs valid, {n_instances} instances taken")
    assert n_outputs > 3 * n


if __name__ == "__main__":
    main()
