#!/usr/bin/env python3
"""JSON schemas keyword by keyword, by the themes of the published suites (JSON-Schema-Test-Suite's
draft 2020-12, JSONSchemaBench): texts that must be taken, texts that must not, and schemas that
must be refused by name. The validator (python3-jsonschema) must agree on each, and random outputs
of each schema must pass it. Numbers at their bounds are also compared with a plain reference.

grammar_keywords.py GRAMMAR_WALK
"""
import itertools
import json
import os
import random
import re
import subprocess
import sys
from decimal import Decimal

try:
    import jsonschema
except ImportError:
    print("skipped: python3-jsonschema is not installed (scripts/install-deps)")
    sys.exit(77)

CASES = []


def n_rounds(short, usual, long):
    """short: sanitizer builds; long: make check-long."""
    return (short if os.environ.get("TANDEM_TEST_SHORT") else
            long if os.environ.get("TANDEM_TEST_LONG") else usual)


def case(theme, schema, take, refuse=(), not_ours=()):
    """not_ours: valid, but no output of ours (docs/use.md says what these are)."""
    CASES.append((theme, schema, list(take), list(refuse), list(not_ours)))


REFUSED = []


def refused(theme, schema, words):
    REFUSED.append((theme, schema, words))


def obj(**properties):
    return {"type": "object", "properties": properties}


INT, STR, BOOL, NULL = ({"type": t} for t in ("integer", "string", "boolean", "null"))


def numbers():
    case("minimum", {"type": "number", "minimum": 1.1}, ["1.1", "2.6", "1.10", "2", "10"],
         ["0.6", "1.0999", "1.09999999999999", "-2", "1", "1.", "01.5", ".5"], ["2e3", "1.5E0"])
    case("minimum", {"type": "number", "minimum": -2},
         ["-1", "0", "-2", "-2.0", "-1.9999", "300.5"],
         ["-2.0001", "-3", "-2.00000001"], ["-0", "-0.0"])
    case("minimum", {"type": "number", "minimum": 1e-7}, ["0.0000001", "0.1"],
         ["0.00000009", "0", "0.00"])
    case("maximum", {"type": "number", "maximum": 3.0}, ["2.6", "3", "3.0", "-1000000", "3.000"],
         ["3.5", "3.0000001", "4"])
    case("maximum", {"type": "number", "maximum": 300}, ["299.97", "300", "300.00", "-0.5"],
         ["300.5", "301"])
    case("maximum", {"type": "number", "maximum": -0.5}, ["-0.5", "-0.50", "-7", "-0.51"],
         ["-0.4", "0", "0.5", "-0.49999999", "0.6"])
    case("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 3.0},
         ["2.2", "2.99999999999999"],
         ["3", "3.0", "3.5"])
    case("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1.1}, ["1.2", "1.1000001"],
         ["1.1", "0.6", "1.10", "1.1000000000000000"])
    case("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
         ["0.5", "1", "1.0", "0.0000000000000001"], ["0", "0.0", "-0", "1.0000000001", "-0.1"])
    case("bounds of both kinds", {"type": "number", "minimum": 1, "exclusiveMinimum": 1,
         "maximum": 2,
                                  "exclusiveMaximum": 5}, ["1.5", "2"], ["1", "1.0", "2.1", "5"])
    case("bounds without a type", {"minimum": 0, "maximum": 9.5}, ["0", "9.5", "3.25"],
         ["-1", "9.6"], ['"x"', "null", "[]"])
    case("bounds of integers", {"type": "integer", "minimum": 1.5, "maximum": 4.5}, ["2", "3", "4"],
         ["1", "5", "2.5"], ["2.0"])
    case("bounds of integers", {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
         ["0"], ["-1", "1"], ["-0"])
    case("bounds beyond a double's digits", {"type": "integer", "minimum": 9007199254740993},
         ["9007199254740993", "9007199254740994"], ["9007199254740992", "1"])
    case("bounds beyond a double's digits", {"type": "integer",
         "exclusiveMaximum": -9007199254740992},
         ["-9007199254740993"], ["-9007199254740992", "-9007199254740991"])
    case("bounds beyond a double's digits", {"type": "number", "minimum": 9007199254740993},
         ["9007199254740993", "9007199254740994"], ["9007199254740992", "9007199254740993.0"],
         ["9007199254740994.5"])
    case("bounds of all digits", {"type": "number", "minimum": 0.1, "maximum": 0.30000000000000004},
         ["0.1", "0.3", "0.1000000000000000", "0.2999999999999999"],
         ["0.0999999999999999", "0.31", "0.3000000000000001"])
    case("large bounds", {"type": "number", "maximum": 1e300, "minimum": -1e300},
         ["0", "1.5", "-7"],
         [], ["1e299"])
    case("two bounds of one whole part", {"type": "number", "minimum": 2.25, "maximum": 2.75},
         ["2.25", "2.250", "2.5", "2.7", "2.75", "2.7499"], ["2", "2.2", "2.249", "2.751", "3"])
    case("two bounds of different signs", {"type": "number", "minimum": -10.5, "maximum": 100.25},
         ["-10.5", "-10", "-9.99", "0", "99.9", "100.25", "100.2"],
         ["-10.6", "-11", "100.26", "101"])
    case("one number", {"type": "number", "minimum": 4.5, "maximum": 4.5}, ["4.5", "4.50"],
         ["4", "4.51", "4.49"])
    case("multipleOf", {"type": "integer", "multipleOf": 2}, ["0", "10", "-4", "1234567890123456"],
         ["7", "-1", "13", "1234567890123457"])
    case("multipleOf", {"type": "number", "multipleOf": 1.5}, ["0", "4.5", "-3.0", "3.0"],
         ["35", "1", "0.5"], ["4.50"])
    case("multipleOf", {"type": "number", "multipleOf": 0.0001}, ["0.0075", "12.0", "1"],
         ["0.00751", "0.00001"])
    case("multipleOf", {"type": "integer", "multipleOf": 1e-8}, ["12391239123", "0", "-5"])
    case("multipleOf", {"type": "integer", "multipleOf": 1000}, ["0", "1000", "-25000"],
         ["100", "1001", "500"])
    case("multipleOf", {"type": "integer", "multipleOf": 7, "minimum": 15, "exclusiveMaximum": 42},
         ["21", "28", "35"], ["14", "42", "22", "7"])
    case("multipleOf", {"type": "number", "multipleOf": 0.25, "minimum": 0.3, "maximum": 10},
         ["0.5", "0.75", "10", "9.25"], ["0.25", "0.3", "10.25", "0.6"])
    case("multipleOf", {"type": "integer", "multipleOf": 0.75}, ["0", "3", "-6"], ["1", "4"])
    case("multipleOf", {"type": ["integer", "null"], "multipleOf": 86400, "minimum": 0},
         ["null", "86400", "604800"], ["86401", "-86400"])
    case("multipleOf without a type", {"multipleOf": 5}, ["5", "-10", "0"], ["1", "12"], ['"x"'])
    refused("multipleOf", {"type": "integer", "multipleOf": 123456789}, "multipleOf")
    refused("multipleOf", {"type": "integer", "multipleOf": 1e30}, "multipleOf")
    refused("empty range", {"type": "number", "minimum": 2, "maximum": 1.5}, "minimum")
    refused("empty range", {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1},
            "minimum")
    refused("empty range", {"type": "integer", "minimum": 1.1, "maximum": 1.9}, "minimum")
    refused("empty range", {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
            "multipleOf")
    refused("beyond the digits", {"type": "number", "minimum": 1e17}, "minimum")
    refused("beyond the digits", {"type": "number", "minimum": 1e-20, "maximum": 2e-20}, "minimum")


def strings():
    case("minLength", {"type": "string", "minLength": 2},
         ['"foo"', '"fo"', '"\\u0041b"', '"\U0001f600é"'],
         ['"f"', '""', '"\U0001f600"'])
    case("maxLength", {"type": "string", "maxLength": 2}, ['"f"', '"\U0001f4a9\U0001f4a9"', '""'],
         ['"foo"', '"\U0001f4a9ab"'])
    case("length without a type", {"maxLength": 2}, ['"ab"'], ['"abc"'], ["1000", "null"])
    case("length as a float", {"type": "string", "maxLength": 2.0, "minLength": 1.0}, ['"ab"'],
         ['""', '"abc"'])
    case("pattern", {"type": "string", "pattern": "^a*$"}, ['"aaa"', '""'], ['"abc"', '"b"'])
    case("pattern is not anchored", {"type": "string", "pattern": "a+"}, ['"xxaayy"', '"a"'],
         ['"xyz"', '""'])
    case("pattern with classes", {"pattern": "^[A-Z]{2}\\d{3}(-[a-z]+)?$"},
         ['"AB123"', '"XY000-q"'],
         ['"A123"', '"AB1234"', '"AB123-"'])
    case("pattern with quotes", {"pattern": '^"[^"\\\\]*"$'}, ['"\\"ab\\""'],
         ['"ab"', '"\\"a\\\\\\""'])
    case("pattern of other scripts", {"pattern": "^[α-ω]+é$"}, ['"αβé"'], ['"abé"', '"α"'])
    refused("pattern", {"pattern": "^(?!x)"}, "(?")
    refused("pattern", {"pattern": "\\p{L}"}, "\\p")
    refused("pattern", {"pattern": "(a)\\1"}, "back-references")
    case("pattern beside lengths", {"pattern": "^([a-z]{2}|é)[0-9]?\\\\?$", "minLength": 1,
                                    "maxLength": 4}, ['"ab"', '"é7"', '"ab1\\\\"', '"é\\\\"'],
         ['""', '"abc"', '"ab12"'])
    case("pattern beside minLength", {"pattern": "[a-z]+", "minLength": 1}, ['"-a-"'], ['""'])
    case("format beside lengths", {"format": "date", "minLength": 10, "maxLength": 10},
         ['"2024-02-29"'], ['"2024-2-9"'])
    refused("pattern beside lengths", {"pattern": "^a", "maxLength": 3}, "maxLength")
    refused("pattern beside lengths", {"pattern": "^a*$", "minLength": 1}, "minLength")
    refused("pattern beside lengths", {"pattern": "^(a|bc){2}$", "maxLength": 3}, "maxLength")
    refused("format beside lengths", {"format": "ipv4", "maxLength": 10}, "maxLength")
    refused("pattern beside a format", {"pattern": "^2", "format": "date"}, "format")
    case("format", {"type": "string", "format": "date"},
         ['"2024-02-28"', '"1963-06-30"', '"2024-02-29"', '"2000-02-29"', '"2020-12-31"',
         '"0100-01-01"'],
         ['"2024-13-01"', '"06/19/1963"', '"2024-00-10"', '"2021-02-29"', '"1900-02-29"',
         '"2024-1-1"',
          '"2024-04-31"', '"0000-01-01"'])
    case("format", {"type": "string", "format": "ipv4"}, ['"192.168.0.1"', '"0.0.0.0"'],
         ['"256.1.1.1"', '"127.0.0"', '"1.2.3.4.5"', '"0x7f.1.1.1"', '"087.10.0.1"'])
    case("format", {"type": "string", "format": "uuid"}, ['"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'],
         ['"2eb8aa08-aa98-11ea-73b441d16380"', '"2eb8aa08aa9811eab4aa73b441d16380"'],
         ['"2EB8AA08-AA98-11EA-B4AA-73B441D16380"'])
    case("format that only describes", {"type": "string", "format": "regex-of-ours"},
         ['"x["', '""'])
    case("format beside lengths", {"type": "string", "format": "email", "maxLength": 5}, ['"a@b"'],
         ['"abcdef"'])
    case("content describes", {"type": "string", "contentMediaType": "application/json",
                               "contentEncoding": "base64", "contentSchema": {"type": "array"}},
         ['"{:}"', '"~"'])


def values():
    case("enum", {"enum": [1, 2, 3]}, ["1", "3"], ["4", "0", '"1"'], ["1.0"])
    case("enum of all types", {"enum": [6, "foo", [], True, {"foo": 12}, None]},
         ["6", '"foo"', "[]", "true", "null", '{"foo": 12}', '{"foo":12}'],
         ["[1]", "false", '{"foo": false}', '{"foo": 12, "boo": 42}', '"null"'])
    case("enum with escapes", {"enum": ["foo\nbar", "foo\rbar", 'q"\\']},
         ['"foo\\nbar"', '"foo\\rbar"', '"q\\"\\\\"'], ['"abc"', '"foo"'])
    case("enum: false is not 0", {"enum": [False]}, ["false"], ["0", "0.0", "[false]", "null"])
    case("enum: 1 is not true", {"enum": [1, [0]]}, ["1", "[0]"], ["true", "[1]"])
    case("enum of a type", {"type": "string", "enum": ["a", "b", 3, None]}, ['"a"', '"b"'],
         ["3", "null", '"c"'])
    case("enum of integers", {"type": "integer", "enum": [1, 2.5, "1", 4]}, ["1", "4"],
         ["2.5", '"1"'])
    case("enum of beginnings", {"enum": ["a", "ab", "abc", ""]}, ['"a"', '"ab"', '"abc"', '""'],
         ['"abcd"', '"b"'])
    case("enum of decimals", {"enum": [0.1, -2.5, 1e3]}, ["0.1", "-2.5", "1000.0"], ["0.2", "0"],
         ["1000", "0.10"])
    case("const", {"const": 2}, ["2"], ["5", '"2"', "-2"], ["2.0"])
    case("const", {"const": {"foo": "bar", "baz": [1, None]}}, ['{"foo": "bar", "baz": [1, null]}'],
         ['{"foo": "bar"}', '{"baz": [1], "foo": "bar"}'], ['{"baz": [1, null], "foo": "bar"}'])
    case("const null", {"const": None}, ["null"], ["0", '""', "false"])
    case("const with a type", {"type": "string", "const": "x"}, ['"x"'], ['"y"'])
    case("enum beside lengths", {"enum": ["a", "bbb", "éé", 5], "maxLength": 2, "minLength": 2},
         ['"éé"', "5"], ['"a"', '"bbb"'])
    case("enum beside bounds", {"enum": [1, 2.5, 10, "x"], "minimum": 2, "exclusiveMaximum": 10},
         ["2.5", '"x"'], ["1", "10"])
    case("enum beside a format", {"type": "integer", "enum": [1, 2], "format": "int32"}, ["1"],
         ["3"])
    case("enum beside keywords of other types",
         {"enum": ["a", 1], "minItems": 3, "required": ["x"]},
         ['"a"', "1"], ['"b"'])
    case("enum beside a bound that a double would not tell apart", {
        "enum": [9007199254740993, 9007199254740992], "maximum": 9007199254740992.0},
         ["9007199254740992"], ["9007199254740993"])
    refused("enum beside a format", {"enum": ["a"], "format": "date"}, "format beside enum")
    case("enum beside a pattern", {"enum": ["a", "b", "ab", 3, 'q"'], "pattern": "^a|\""},
         ['"a"', '"ab"', "3", '"q\\""'], ['"b"'])
    refused("enum beside items", {"enum": [[1], ["x"]], "items": INT}, "items beside enum")
    refused("enum beside multipleOf", {"enum": [1, 10], "multipleOf": 5}, "multipleOf beside enum")
    case("enum and const", {"enum": [1, 2], "const": 1}, ["1"], ["2", "3"])
    refused("enum and const", {"enum": [1, 2], "const": 3}, "enum")
    refused("enum without values", {"enum": []}, "enum")
    refused("enum of no value of the type", {"type": "null", "enum": [1]}, "type")
    for name, yes, no in (("integer", ["1", "-1"], ["1.1", '"1"', "true", "null", "{}", "[]"]),
                          ("number", ["1", "1.5", "-2e3"], ['"1"', "true", "null", "{}"]),
                          ("string", ['"foo"', '""', '"1"'], ["1", "null", "{}", "[]", "true"]),
                          ("object", ["{}", '{"a": 1}'], ["1", '"foo"', "[]", "null"]),
                          ("array", ["[]", "[1, null]"], ["1", "{}", '"[]"', "null"]),
                          ("boolean", ["true", "false"], ["0", "1", '"true"', "null"]),
                          ("null", ["null"], ["0", "false", '""', "[]"])):
        case("type " + name, {"type": name}, yes, no)
    case("several types", {"type": ["integer", "string"]}, ["1", '"x"'],
         ["1.1", "true", "{}", "null"])
    case("several types", {"type": ["array", "object", "null"]}, ["[1]", "{}", "null"],
         ["1", '"x"'])
    refused("type", {"type": "float"}, "float")
    case("the schema true", True, ["1", '"foo"', "null", '{"a": [true]}', "[]"])
    case("the empty schema", {}, ["1", '"foo"', "null", '{"a": [true]}', "[]"])
    refused("the schema false", False, "false")


def objects():
    case("properties", {**obj(foo=INT, bar=STR), "additionalProperties": True},
         ['{"foo": 1, "bar": "baz"}', "{}", '{"bar": "", "quux": []}', '{"quux": []}'],
         ['{"foo": "x"}', '{"foo": [], "bar": {}}', '{"bar": 1}'], ['{"bar": "x", "foo": 1}'])
    case("properties alone are all", obj(foo=INT), ['{"foo": 1}', "{}"], ['{"foo": null}'],
         ['{"bar": 1}', '{"foo": 1, "bar": 2}'])
    case("properties with booleans", {**obj(foo=True, bar=False), "additionalProperties": True},
         ["{}", '{"foo": 1}', '{"foo": null, "baz": 2}', '{"bars": 1, "ba": 1, "": 2}'],
         ['{"bar": 2}', '{"foo": 1, "bar": 2}', '{"ba": 1, "bar": 0}'])
    case("properties with escaped names", {**obj(**{'foo"bar': INT, "foo\nbar": INT, "a\\b": INT,
                                                     "tab\t": INT}), "additionalProperties": False},
         ['{"foo\\"bar": 1, "foo\\nbar": 2, "a\\\\b": 3, "tab\\t": 4}'],
         ['{"foo\\nbar": "x"}', '{"foobar": 1}'])
    case("properties named as JavaScript's", {**obj(**{"__proto__": INT, "toString": {
        "properties": {"length": STR}}, "constructor": INT}), "additionalProperties": False},
         ["{}", '{"__proto__": 1, "toString": {"length": "x"}, "constructor": 37}'],
         ['{"__proto__": "foo"}', '{"toString": {"length": 37}}'])
    case("properties of null", obj(foo=NULL), ['{"foo": null}'], ['{"foo": 0}'])
    case("required", {**obj(foo={}, bar={}), "required": ["foo"]},
         ['{"foo": 1}', '{"foo": 1, "bar": null}'], ['{"bar": 1}', "{}"])
    case("required without properties", {"type": "object", "required": ["foo"]},
         ['{"foo": 1}', '{"foo": {}, "x": 1}'], ['{"bar": 1}', "{}"])
    case("required of escaped names", {"type": "object", "required": ['a"b', "c\nd"]},
         ['{"a\\"b": 1, "c\\nd": 2}'], ['{"a\\"b": 1}', "{}"])
    case("required is empty", {**obj(foo={}), "required": []}, ["{}", '{"foo": 1}'])
    case("required of the schema of others", {"type": "object", "additionalProperties": INT,
                                               "required": ["k"]},
         ['{"k": 1}', '{"k": 1, "l": 2}'], ['{"k": "x"}', "{}", '{"k": 1, "l": "x"}'])
    refused("required and closed", {**obj(a={}), "required": ["b"], "additionalProperties": False},
            "b")
    refused("required and false", {**obj(a=False), "required": ["a"]}, "property a")
    case("additionalProperties false", {**obj(foo={}, bar={}), "additionalProperties": False},
         ['{"foo": 1}', "{}"], ['{"quux": 1}', '{"foo": 1, "fo": 2}'])
    case("additionalProperties as a schema", {**obj(foo={}, bar={}), "additionalProperties": BOOL},
         ['{"foo": 1, "bar": 2, "quux": true}', '{"foob": true}', '{"fo": false}'],
         ['{"quux": 12}', '{"foo": 1, "quux": null}'])
    case("additionalProperties alone", {"additionalProperties": BOOL}, ['{"foo": true}', "{}"],
         ['{"foo": 1}'], ["3"])
    case("additionalProperties of objects", {"type": "object", "additionalProperties": obj(x=INT)},
         ['{"a": {"x": 1}, "b": {}}'], ['{"a": {"x": "1"}}', '{"a": 1}'])
    case("nested objects", obj(a={**obj(b={**obj(c=INT), "required": ["c"]}), "required": ["b"]}),
         ['{"a": {"b": {"c": 3}}}', "{}"], ['{"a": {"b": {}}}', '{"a": {}}'])


def arrays():
    case("items", {"type": "array", "items": INT}, ["[1, 2, 3]", "[]"], ['[1, "x"]', '{"0": 1}'])
    case("items without a type", {"items": INT}, ["[1]"], ['["x"]'], ['"x"', "{}"])
    case("items true", {"type": "array", "items": True}, ['[1, "foo", true]', "[]"])
    case("items false", {"type": "array", "items": False}, ["[]"], ["[1]", "[null]"])
    case("items of items", {"type": "array", "items": {"type": "array", "items": {
        "type": "array", "items": {"type": "number"}}}}, ["[[[1], [2, 3.5]], []]"],
        ['[[["1"]]]', "[[1]]", "[1]"])
    case("items of null", {"type": "array", "items": NULL}, ["[null]"], ["[0]"])
    case("prefixItems", {"type": "array", "prefixItems": [INT, STR]},
         ["[1]", '[1, "foo"]', '[1, "foo", true]', "[]"], ['["foo", 1]', "[1, 2]"])
    case("prefixItems and no more", {"type": "array", "prefixItems": [{}, {}, {}], "items": False},
         ["[]", "[1]", "[1, 2, 3]"], ["[1, 2, 3, 4]"])
    case("prefixItems and others", {"type": "array", "prefixItems": [STR], "items": INT},
         ['["x", 2, 3]', '["x"]', "[]"], ['["x", "y"]', "[1]"])
    case("prefixItems with booleans", {"type": "array", "prefixItems": [True, NULL]},
         ["[1, null]", "[]", "[2]"], ["[1, 2]"])
    case("prefixItems: false ends the array", {"type": "array", "prefixItems": [True, False]},
         ["[]", "[1]"], ['[1, "foo"]', "[1, 2, 3]"])
    case("minItems", {"type": "array", "minItems": 1}, ["[1]", "[1, 2]"], ["[]"])
    case("minItems beyond prefixItems", {"type": "array", "prefixItems": [INT], "minItems": 3},
         ["[1, null, 2]", "[1, 1, 1, 1]"], ["[1]", "[1, 2]"])
    case("maxItems", {"type": "array", "maxItems": 2}, ["[]", "[1, 2]"], ["[1, 2, 3]"])
    case("maxItems 0", {"type": "array", "maxItems": 0.0}, ["[]"], ["[1]"])
    case("both counts", {"type": "array", "items": BOOL, "minItems": 2, "maxItems": 3},
         ["[true, false]", "[true, true, true]"], ["[]", "[true]", "[true,true,true,true]"])
    refused("counts", {"type": "array", "minItems": 3, "maxItems": 2}, "minItems")
    case("uniqueItems false", {"type": "array", "uniqueItems": False}, ["[1, 1]", "[1, 2]", "[]"])


def together():
    case("allOf", {"allOf": [{**obj(bar=INT), "required": ["bar"]}, {**obj(foo=STR),
                                                                    "required": ["foo"]}]},
         ['{"bar": 2, "foo": "baz"}'], ['{"foo": "baz"}', '{"bar": 2}', '{"bar": "x", "foo": "y"}'],
         ['{"foo": "baz", "bar": 2}'])
    case("allOf with a base", {**obj(bar=INT), "required": ["bar"], "allOf": [
        {"properties": {"foo": STR}, "required": ["foo"]}, {"properties": {"baz": NULL}}]},
         ['{"bar": 2, "foo": "quux", "baz": null}', '{"bar": 2, "foo": "q"}'],
         ['{"bar": 2}', '{"foo": "quux"}', '{"bar": 2, "foo": "quux", "baz": 1}'])
    case("allOf of bounds", {"type": "number", "allOf": [{"maximum": 30.5}, {"minimum": 20}]},
         ["25", "30.5", "20"], ["35", "19.9"])
    case("allOf of multiples", {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
         ["12", "0", "-24"], ["4", "6", "18"])
    refused("allOf of multiples", {"allOf": [{"multipleOf": 0.3}, {"multipleOf": 0.5}]},
            "multipleOf")
    case("allOf of lengths", {"type": "string", "allOf": [{"minLength": 2}, {"minLength": 3},
                                                          {"maxLength": 9}, {"maxLength": 4}]},
         ['"abc"', '"abcd"'], ['"ab"', '"abcde"'])
    case("allOf with true", {"allOf": [True, {"type": "integer"}, {}]}, ["1"], ['"x"'])
    case("allOf of one", {"allOf": [{"type": "number"}]}, ["1"], ['"foo"'])
    case("allOf of one property", {"allOf": [obj(a={"type": ["integer", "null"]}), obj(a={
        "type": ["number", "string"]})]}, ['{"a": 1}'], ['{"a": null}', '{"a": "x"}', '{"a": 1.5}'])
    case("allOf of enums", {"allOf": [{"enum": [1, "a", [2.0], {"x": 1}]},
                                      {"enum": [{"x": 1.0}, [2], 3, "a"]}]},
         ['"a"', "[2.0]", '{"x": 1}'], ["1", "3"], ["[2]", '{"x": 1.0}'])
    case("allOf of one const", {"allOf": [{"const": 1}, {"const": 1}]}, ["1"], ["2"])
    case("allOf of one const, written in two ways", {"allOf": [{"const": 1}, {"const": 1.0}]},
         ["1"], ["2"], ["1.0"])
    refused("allOf of two consts", {"allOf": [{"const": 1}, {"const": 2}]}, "const")
    refused("allOf of two consts", {"allOf": [{"const": "a"}, {"const": "b"}]}, "const")
    refused("allOf of enums", {"allOf": [{"enum": [1, 2]}, {"enum": [3]}]}, "enum")
    case("anyOf, where an enum leaves nothing of a part", {"enum": ["a", 1], "anyOf": [
        {"type": "null"}, {"const": "b"}, {"type": "string"}]}, ['"a"'], ["1", "null", '"b"'])
    case("allOf of a closed object and declared ones", {"allOf": [
        {**obj(a=INT, b={}), "additionalProperties": False}, {"properties": {"b": STR}}]},
         ['{"a": 1, "b": ""}', "{}"], ['{"b": 1}', '{"a": 1, "c": 1}'])
    case("allOf of an open object", {"allOf": [{**obj(a=INT), "additionalProperties": True},
                                               obj(b=STR)]},
         ['{"a": 1, "b": "", "c": 0}', "{}"], ['{"b": 1}', '{"a": ""}'])
    refused("allOf of nothing", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "type")
    refused("allOf with false", {"allOf": [True, False]}, "allOf")
    refused("allOf of two patterns", {"type": "string",
            "allOf": [{"pattern": "a"}, {"pattern": "b"}]},
            "pattern")
    refused("allOf of closed objects", {"allOf": [{**obj(a=INT), "additionalProperties": False},
                                                  obj(b=INT)]}, "additionalProperties")
    case("anyOf", {"anyOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
         ["1", "2.5", "3", "-5"], ["1.5", '"x"'])
    case("anyOf with a base", {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
         ['"ab"', '"abcd"'], ['"abc"', "3"])
    case("anyOf with booleans", {"anyOf": [True, False]}, ["1", '"foo"'])
    case("anyOf with the empty schema", {"anyOf": [{"type": "number"}, {}]}, ['"foo"', "123"])
    case("anyOf of objects", {"anyOf": [{**obj(bar=INT), "required": ["bar"]},
                                        {**obj(foo=STR), "required": ["foo"]}]},
         ['{"bar": 2}', '{"foo": "baz"}'], ['{"foo": 2}', "{}"])
    case("anyOf in anyOf", {"anyOf": [{"anyOf": [{"type": "null"}]}]}, ["null"], ["123"])
    refused("anyOf of nothing", {"anyOf": [False, False]}, "anyOf")
    case("oneOf with a discriminator", {"oneOf": [
        {**obj(kind={"const": "a"}, x=INT), "required": ["kind", "x"]},
        {**obj(kind={"const": "b"}, y=STR), "required": ["kind"]}]},
         ['{"kind": "a", "x": 1}', '{"kind": "b"}'], ['{"kind": "a"}', '{"kind": "c"}'])
    case("oneOf of types", {"oneOf": [INT, STR, NULL]}, ["1", '"x"', "null"], ["1.5", "true"])
    case("an optional field as Pydantic has it",
         {**obj(n={"anyOf": [{"type": "number", "exclusiveMinimum":
         0}, NULL], "default": None, "title": "N"}), "title": "M"},
         ["{}", '{"n": null}', '{"n": 0.5}'],
         ['{"n": 0}', '{"n": "x"}', '{"n": -1}'])


def references():
    case("$ref to the root", {**obj(foo={"$ref": "#"}), "additionalProperties": False},
         ['{"foo": {"foo": {}}}', "{}"], ['{"foo": {"bar": false}}', '{"bar": 1}'])
    case("$ref to a sibling", obj(foo=INT, bar={"$ref": "#/properties/foo"}), ['{"bar": 3}'],
         ['{"bar": true}'])
    case("$ref into an array", {"type": "array", "prefixItems": [INT, {"$ref": "#/prefixItems/0"}]},
         ["[1, 2]"], ['[1, "foo"]'])
    case("$ref with escapes", {"$defs": {"tilde~field": INT, "slash/field": STR,
         "percent%field": NULL},
                               **obj(tilde={"$ref": "#/$defs/tilde~0field"},
                                     slash={"$ref": "#/$defs/slash~1field"},
                                     percent={"$ref": "#/$defs/percent%25field"})},
         ['{"tilde": 1, "slash": "x", "percent": null}'],
         ['{"tilde": "x"}', '{"slash": 1}', '{"percent": 1}'])
    case("$ref with an escaped slash", {"$defs": {"a": {"b": INT}, "a/b": STR, "a~b": NULL}, **obj(
        path={"$ref": "#/$defs/a%2Fb"}, name={"$ref": "#/$defs/a~1b"},
        tilde={"$ref": "#/%24defs/a%7E0b"})}, ['{"path": 1, "name": "x", "tilde": null}'],
        ['{"path": "x"}', '{"name": 1}', '{"tilde": 1}'])
    refused("$ref to a name beyond the limit", {"$defs": {"a" * 1024: INT},
                                                "$ref": "#/$defs/" + "a" * 1025}, "$ref")
    case("$ref to $ref", {"$defs": {"a": INT, "b": {"$ref": "#/$defs/a"},
         "c": {"$ref": "#/$defs/b"}},
                          "$ref": "#/$defs/c"}, ["5"], ['"a"'])
    case("$ref beside keywords", {"$defs": {"r": {"type": "array"}}, **obj(foo={
        "$ref": "#/$defs/r", "maxItems": 2})}, ['{"foo": []}', '{"foo": [1, 2]}'],
        ['{"foo": [1, 2, 3]}', '{"foo": "x"}'])
    case("a property named $ref", obj(**{"$ref": STR}), ['{"$ref": "a"}'], ['{"$ref": 2}'])
    case("$ref to booleans", {"$defs": {"b": True}, "$ref": "#/$defs/b"}, ['"foo"', "1"])
    case("$ref in enum is a value", {"enum": [{"$ref": "#/x"}]}, ['{"$ref": "#/x"}'], ["{}"])
    case("definitions of older drafts", {"definitions": {"n": INT}, "type": "array",
                                         "items": {"$ref": "#/definitions/n"}}, ["[1]"], ['["x"]'])
    case("a tree", {"$defs": {"node": {**obj(value={"type": "number"}, subtree={
        "type": "array", "items": {"$ref": "#/$defs/node"}}), "required": ["value"]}},
        "$ref": "#/$defs/node"},
         ['{"value": 1.5, "subtree": [{"value": 2}, {"value": 3, "subtree": []}]}'],
         ['{"value": 1, "subtree": [{"value": "x"}]}', '{"subtree": []}'])
    refused("additionalProperties speaks of its own side alone", {"$defs": {"int": INT}, "allOf": [
        obj(foo={"$ref": "#/$defs/int"}), {"additionalProperties": {"$ref": "#/$defs/int"}}]},
            "additionalProperties")
    refused("$ref to an anchor", {"$defs": {"a": {"$anchor": "x", **INT}}, "$ref": "#x"}, "#x")
    refused("$ref to another document", {"$ref": "https://example.com/s.json"}, "example.com")
    refused("$ref to a part of another", {"$ref": "other.json#/a"}, "other.json")
    refused("$ref below another $id", {"$id": "http://x/root", "$defs": {
        "a": {"$id": "inner", "$defs": {"b": INT}, **obj(v={"$ref": "#/$defs/b"})}, "b": STR},
        **obj(a={"$ref": "#/$defs/a"})}, "$id")
    refused("$dynamicRef", {"$dynamicRef": "#n"}, "$dynamicRef")


def names():
    """patternProperties, propertyNames, counts of properties, what depends on a property."""
    case("patternProperties", {"type": "object", "patternProperties": {"f.*o": INT}},
         ["{}", '{"foo": 1}', '{"foo": 1, "foooooo": 2, "xfo": 3}'], ['{"foo": "bar"}'],
         ['{"bar": 1}'])
    case("patternProperties and no others", {"type": "object", "patternProperties": {
        "^[a-z]+$": {"type": "array", "items": INT}}, "additionalProperties": False},
         ['{"ab": [1]}', "{}"], ['{"a1": [1]}', '{"ab": ["x"]}', '{"": []}'])
    case("patternProperties of one schema", {"type": "object", "patternProperties": {
        "^a": BOOL, "^b": BOOL}}, ['{"ax": true, "b": false}'], ['{"a": 1}'], ['{"c": 1}'])
    case("patternProperties beside properties", {**obj(foo={"maxLength": 5, "type": "string"},
         bar={}, baz=INT), "patternProperties": {"^f": {"minLength": 2, "type": "string"},
                                                 "z$": {"minimum": 5, "type": "integer"}}},
         ['{"foo": "ab", "bar": 1, "baz": 5}', "{}"],
         ['{"foo": "a"}', '{"foo": "abcdef"}', '{"baz": 4}'], ['{"fx": "ab"}', '{"z": 7}'])
    case("patternProperties of a required name", {"type": "object", "required": ["foo"],
         "patternProperties": {"^f": INT}, "additionalProperties": False},
         ['{"foo": 1}'], ['{"foo": "x"}', "{}"], ['{"foo": 1, "fa": 2}'])
    case("patternProperties that are false", {**obj(foo=INT, bar=INT),
         "patternProperties": {"^f": False}}, ['{"bar": 1}', "{}"], ['{"foo": 1}'])
    case("patternProperties of escaped names", {**obj(**{'a"b': {}, "c\nd": {}}),
         "patternProperties": {'"': INT, "\n": STR}},
         ['{"a\\"b": 1, "c\\nd": "x"}'], ['{"a\\"b": "x"}', '{"c\\nd": 1}'])
    case("patternProperties without a pattern", {**obj(a=INT), "patternProperties": {}},
         ['{"a": 1}'], ['{"a": "x"}'])
    refused("patternProperties of several schemas", {"patternProperties": {"^f": INT, "^b": STR}},
            "patternProperties")
    refused("patternProperties with false", {"patternProperties": {"^f": False}},
            "patternProperties")
    refused("patternProperties beside propertyNames", {
        "patternProperties": {"^f": INT}, "propertyNames": {"maxLength": 3}}, "propertyNames")
    refused("patternProperties", {"type": "object", "patternProperties": {"(": INT}},
            "parenthesis")
    refused("required and false by its pattern", {"required": ["foo"], "patternProperties": {
        "^f": False}}, "foo")
    case("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}},
         ['{"f": {}, "foo": {}}', "{}"], ['{"foobar": {}}', '{"foo": {}, "foobar": {}}'])
    case("propertyNames with a pattern", {"type": "object", "additionalProperties": INT,
         "propertyNames": {"pattern": "^a+$"}}, ['{"a": 1, "aa": 2}', "{}"],
         ['{"aaA": 1}', '{"": 1}', '{"a": "x"}'])
    case("propertyNames of an enum", {"type": "object", "propertyNames": {"enum": ["foo", "bar"]}},
         ['{"foo": 1}', '{"bar": [], "foo": 1}'], ['{"baz": 1}'])
    case("propertyNames with booleans", {"type": "object", "propertyNames": True}, ['{"foo": 1}'])
    case("propertyNames with booleans", {"type": "object", "propertyNames": False}, ["{}"],
         ['{"foo": 1}'])
    case("propertyNames beside properties", {**obj(foo=INT, foobar=INT), "propertyNames": {
        "maxLength": 3}}, ['{"foo": 1}', "{}"], ['{"foobar": 1}', '{"foo": "x"}'])
    case("propertyNames by $ref", {"$defs": {"n": {"pattern": "^x"}}, "type": "object",
         "propertyNames": {"$ref": "#/$defs/n"}}, ['{"x1": 1}'], ['{"y": 1}'])
    refused("propertyNames by $ref beside properties", {"$defs": {"n": {"pattern": "^x"}},
            **obj(x=INT), "propertyNames": {"$ref": "#/$defs/n"}}, "$ref")
    case("minProperties", {"type": "object", "minProperties": 1}, ['{"foo": 1}',
         '{"foo": 1, "bar": 2}'], ["{}"])
    case("minProperties of declared ones", {**obj(a=INT, b=INT, c=INT), "minProperties": 2},
         ['{"a": 1, "c": 3}', '{"b": 1, "c": 3}', '{"a": 1, "b": 2, "c": 3}'],
         ["{}", '{"a": 1}', '{"c": 1}'])
    case("minProperties of declared ones and one more", {**obj(a=INT, b=INT), "minProperties": 3,
         "additionalProperties": STR}, ['{"a": 1, "b": 2, "c": ""}',
         '{"a": 1, "b": 2, "c": "", "d": ""}'], ['{"a": 1, "b": 2}', '{"c": ""}'],
         ['{"a": 1, "c": "", "d": ""}'])
    refused("minProperties of names that may be the same", {"type": "object", "minProperties": 2},
            "minProperties")
    refused("minProperties", {**obj(a=INT), "minProperties": 2}, "minProperties")
    case("maxProperties", {"type": "object", "maxProperties": 2},
         ['{"foo": 1}', '{"foo": 1, "bar": 2}', "{}"], ['{"foo": 1, "bar": 2, "baz": 3}'])
    case("maxProperties 0", {**obj(a=INT), "maxProperties": 0}, ["{}"], ['{"a": 1}'])
    case("maxProperties of declared ones", {**obj(a=INT, b=INT, c=INT), "maxProperties": 2.0,
         "required": ["c"]}, ['{"c": 3}', '{"a": 1, "c": 3}'], ['{"a": 1, "b": 2, "c": 3}',
                                                               '{"a": 1, "b": 2}'])
    case("minProperties and maxProperties", {**obj(a=INT), "minProperties": 1, "maxProperties": 2,
         "additionalProperties": INT}, ['{"a": 1}', '{"a": 1, "x": 2}', '{"x": 1, "y": 2}'],
         ["{}", '{"a": 1, "x": 2, "y": 3}', '{"x": 1, "y": 2, "z": 3}'])
    refused("maxProperties below minProperties", {"minProperties": 3, "maxProperties": 1}, "Prop")
    case("dependentRequired", {"type": "object", "dependentRequired": {"bar": ["foo"]}},
         ["{}", '{"foo": 1}', '{"bar": 2, "foo": 1}', '{"baz": 1}'], ['{"bar": 2}'],
         ['{"foo": 1, "bar": 2}'])
    case("dependentRequired of declared ones", {**obj(a=INT, b=INT, c=INT), "dependentRequired": {
        "a": ["b", "c"], "b": ["c"]}}, ["{}", '{"c": 1}', '{"b": 1, "c": 1}',
                                        '{"a": 1, "b": 1, "c": 1}'],
         ['{"a": 1}', '{"a": 1, "b": 1}', '{"b": 1}', '{"a": 1, "c": 1}'])
    case("dependentRequired of nothing", {**obj(a=INT), "dependentRequired": {"a": []}},
         ["{}", '{"a": 1}'], ['{"a": "x"}'])
    case("dependentRequired of a closed object", {**obj(a=INT), "additionalProperties": False,
         "dependentRequired": {"a": ["b"]}}, ["{}"], ['{"a": 1}'])
    case("dependentRequired of a required one", {**obj(a=INT, b=INT), "required": ["a"],
         "dependentRequired": {"a": ["b"]}}, ['{"a": 1, "b": 2}'], ["{}", '{"a": 1}', '{"b": 1}'])
    case("dependentRequired and null", {"type": ["object", "null"],
         "properties": {"a": {}, "b": {}},
         "dependentRequired": {"a": ["b"]}}, ["null", "{}", '{"a": 1, "b": 2}'], ['{"a": 1}', "1"])
    refused("dependentRequired of many", {"dependentRequired": {c: ["z"] for c in "abcdef"}},
            "dependentRequired")
    refused("dependentRequired", {**obj(a={}), "required": ["a"], "additionalProperties": False,
                                  "dependentRequired": {"a": ["b"]}}, "dependentRequired")
    case("dependentSchemas", {**obj(bar={}, foo={}), "dependentSchemas": {"bar": {
        "properties": {"foo": INT, "bar": INT}}}},
         ['{"bar": 2, "foo": 1}', '{"foo": "quux"}', "{}", '{"bar": 1}'],
         ['{"bar": "x"}', '{"bar": 2, "foo": "quux"}'])
    case("dependentSchemas with booleans", {**obj(foo={}, bar={}), "dependentSchemas": {
        "foo": True, "bar": False}}, ['{"foo": 1}', "{}"], ['{"bar": 2}', '{"foo": 1, "bar": 2}'])
    case("a payment by card has a billing address", {**obj(name=STR, card={"type": "number"},
         address=STR), "required": ["name"], "dependentRequired": {"card": ["address"]}},
         ['{"name": "J", "card": 5, "address": "A"}', '{"name": "J"}',
         '{"name": "J", "address": ""}'],
         ['{"name": "J", "card": 5}'])
    case("unevaluatedProperties", {**obj(foo=STR), "unevaluatedProperties": False},
         ['{"foo": "x"}', "{}"], ['{"foo": "x", "bar": 1}'])
    case("unevaluatedProperties across allOf", {**obj(foo=STR), "allOf": [{"properties": {
        "bar": INT}}], "unevaluatedProperties": False}, ['{"foo": "x", "bar": 1}'],
         ['{"foo": "x", "bar": 1, "baz": 2}', '{"bar": "x"}'])
    case("unevaluatedProperties across $ref and anyOf",
         {"$defs": {"a": obj(a=INT)}, "$ref": "#/$defs/a",
         "anyOf": [{**obj(b=INT), "required": ["b"]}, {**obj(c=INT), "required": ["c"]}],
         "unevaluatedProperties": False}, ['{"a": 1, "b": 2}', '{"c": 3}'],
         ['{"a": 1}', '{"a": 1, "d": 2}', '{"b": 1, "x": 2}'])
    case("unevaluatedProperties of a schema", {**obj(foo=STR), "unevaluatedProperties": INT},
         ['{"foo": "x", "bar": 1}'], ['{"bar": "x"}'])
    refused("unevaluatedProperties inside allOf", {"allOf": [{**obj(a=INT), "unevaluatedProperties":
            False}, obj(b=INT)]}, "unevaluatedProperties")


def sets():
    """uniqueItems and contains."""
    colours = {"enum": ["red", "green", "blue"]}
    case("uniqueItems of an enum", {"type": "array", "items": colours, "uniqueItems": True},
         ["[]", '["red"]', '["blue", "red"]', '["blue", "red", "green"]'],
         ['["red", "red"]', '["red", "green", "red"]', '["x"]', '["red","green","blue","red"]'])
    case("uniqueItems with counts", {"type": "array", "items": {"enum": [1, 2, "a", None]},
         "uniqueItems": True, "minItems": 2, "maxItems": 3}, ["[1, 2]", '[null, "a", 1]'],
         ["[]", "[1]", "[2, 2]", '[1, 2, "a", null]'])
    case("uniqueItems of booleans", {"type": "array", "items": {"type": ["boolean", "null"]},
         "uniqueItems": True}, ["[true, false]", "[null, false, true]"],
         ["[true, true]", "[null, null]", "[0]"])
    case("uniqueItems: 1 and 1.0 are equal", {"type": "array", "items": {"enum": [1, 1.0, 2]},
         "uniqueItems": True}, ["[1, 2]", "[2]"], ["[1, 1.0]", "[1, 1]"], ["[1.0]"])
    case("uniqueItems by $ref", {"$defs": {"c": colours}, "type": "array", "items": {
        "$ref": "#/$defs/c"}, "uniqueItems": True}, ['["red", "blue"]'], ['["red", "red"]'])
    case("uniqueItems of one", {"type": "array", "items": STR, "uniqueItems": True, "maxItems": 1},
         ['["a"]', "[]"], ['["a", "b"]', "[1]"])
    case("uniqueItems merged", {"type": "array", "items": colours, "allOf": [
        {"uniqueItems": True}, {"uniqueItems": False}]}, ['["red"]'], ['["red", "red"]'])
    refused("uniqueItems", {"type": "array", "uniqueItems": True}, "uniqueItems")
    refused("uniqueItems", {"type": "array", "items": STR, "uniqueItems": True}, "uniqueItems")
    refused("uniqueItems of many", {"type": "array", "items": {"enum": list(range(9))},
                                    "uniqueItems": True}, "uniqueItems")
    refused("uniqueItems of objects", {"type": "array", "items": {"enum": [{}, 1]},
                                       "uniqueItems": True}, "uniqueItems")
    refused("uniqueItems of few", {"type": "array", "items": {"enum": [1]}, "minItems": 2,
                                   "uniqueItems": True}, "uniqueItems")
    refused("uniqueItems beside prefixItems",
            {"type": "array", "items": colours, "prefixItems": [{}],
                                               "uniqueItems": True}, "uniqueItems")
    case("contains", {"type": "array", "contains": {"type": "number", "minimum": 5}},
         ["[3, 4, 5]", "[5]", "[3, 4, 5, 6]", '["x", 7.5, null]'], ["[2, 3, 4]", "[]", '["5"]'])
    case("contains beside items", {"type": "array", "items": {"type": "integer", "minimum": 0},
         "contains": {"maximum": 9}}, ["[1]", "[100, 9, 11]"], ["[10]", "[]", "[-1]", '[1, "x"]'])
    case("contains a const", {"type": "array", "contains": {"const": 5}},
         ["[5]", "[5, 5]", "[1, 5]"],
         ["[1, 2]", "[]"])
    case("contains with booleans", {"type": "array", "contains": True}, ["[1]"], ["[]"])
    case("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2},
         ["[1, 1]", "[1, 2, 1]", "[0, 1, 1, 1]"], ["[]", "[1]", "[1, 2]"])
    case("minContains 0", {"type": "array", "contains": {"const": 1}, "minContains": 0},
         ["[]", "[2]", "[1]"])
    case("minContains without contains", {"type": "array", "minContains": 3}, ["[]", "[1]"])
    case("contains with counts", {"type": "array", "items": INT, "contains": {"const": 7},
         "minItems": 2, "maxItems": 3}, ["[7, 1]", "[1, 2, 7]", "[7, 7, 7]"],
         ["[7]", "[1, 2]", "[1, 2, 3]", "[7, 1, 2, 3]"])
    case("maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 1},
         ["[1]", "[2, 1]", '["x", 1, null]', "[1, 2.5, 0]"], ["[]", "[2]", "[1, 1]", "[1, 2, 1]"],
         ["[1, 1e3]"])
    case("maxContains of types", {"type": "array", "items": {"type": ["string", "integer"]},
         "contains": STR, "minContains": 1, "maxContains": 2},
         ['["a"]', '[1, "a", 2, "b", 3]', '["a", "b"]'],
         ["[]", "[1]", '["a", "b", "c"]', '["a", 1, "b", "c"]'])
    case("maxContains 0", {"type": "array", "contains": NULL, "minContains": 0, "maxContains": 0,
         "items": {"type": ["null", "boolean"]}}, ["[]", "[true]", "[false, true]"],
         ["[null]", "[true, null]"])
    case("maxContains with counts", {"type": "array", "items": {"type": "integer"}, "contains": {
        "minimum": 10}, "minContains": 2, "maxContains": 3, "minItems": 3, "maxItems": 5},
         ["[10, 11, 1]", "[1, 10, 2, 11, 12]", "[10, 11, 12]"],
         ["[10, 11]", "[10, 1, 2]", "[10, 11, 12, 13]", "[10, 11, 1, 2, 3, 4]", "[]"])
    case("maxContains of objects", {"type": "array", "items": {**obj(main=BOOL, n=INT),
         "additionalProperties": False}, "contains": {"properties": {"main": {"const": True}},
                                                      "required": ["main"]}, "maxContains": 1},
         ['[{"main": true}]', '[{"n": 1}, {"main": true, "n": 2}, {"main": false}]'],
         ["[]", "[{}]", '[{"main": true}, {"main": true}]'])
    case("maxContains of all", {"type": "array", "contains": True, "maxContains": 2},
         ["[1]", '[1, "x"]'], ["[]", "[1, 2, 3]"])
    case("maxContains of none", {"type": "array", "contains": False, "minContains": 0,
                                 "maxContains": 2}, ["[]", "[1, 2, 3]"])
    case("maxContains without contains", {"type": "array", "maxContains": 0}, ["[]", "[1]"])
    refused("maxContains below minContains", {"type": "array", "contains": INT, "minContains": 2,
                                              "maxContains": 1}, "minContains")
    refused("maxContains of a pattern", {"type": "array", "items": STR, "contains": {
        "pattern": "a"}, "maxContains": 1}, "maxContains")
    refused("maxContains of many", {"type": "array", "contains": INT, "maxContains": 4000,
                                    "items": INT}, "limit")
    refused("contains: false", {"type": "array", "contains": False}, "false")
    refused("contains beside prefixItems", {"type": "array", "prefixItems": [INT], "contains": STR},
            "contains")
    refused("contains of two sides", {"type": "array", "allOf": [{"contains": STR},
                                                                 {"contains": INT}]}, "contains")
    case("unevaluatedItems", {"type": "array", "prefixItems": [STR], "unevaluatedItems": False},
         ['["x"]', "[]"], ['["x", 1]'])
    case("unevaluatedItems across allOf", {"type": "array", "allOf": [{"prefixItems": [STR, INT]}],
         "unevaluatedItems": BOOL}, ['["x", 1, true]', '["x"]'], ['["x", 1, 2]'])
    refused("unevaluatedItems inside allOf", {"allOf": [{"prefixItems": [STR], "unevaluatedItems":
            False}, {"prefixItems": [STR, STR]}]}, "unevaluatedItems")


def conditions():
    """if, then, else."""
    kind = {"enum": ["a", "b", "c"]}
    is_a = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
    both = {**obj(kind=kind, x=INT, y=STR), "additionalProperties": False}
    case("if a property is a const", {**both, "required": ["kind"], "if": is_a,
                                      "then": {"required": ["x"]}, "else": {"required": ["y"]}},
         ['{"kind": "a", "x": 1}', '{"kind": "a", "x": 1, "y": ""}', '{"kind": "b", "y": ""}',
          '{"kind": "c", "x": 2, "y": ""}'],
         ['{"kind": "a"}', '{"kind": "a", "y": ""}', '{"kind": "b", "x": 1}', '{"y": ""}', "{}"])
    case("if without then", {**both, "if": is_a, "else": {"required": ["y"]}},
         ['{"kind": "a"}', '{"y": ""}', '{"kind": "b", "y": ""}'], ["{}", '{"kind": "b"}',
                                                                    '{"x": 1}'])
    case("if without else", {**both, "if": is_a, "then": {"properties": {"x": {"minimum": 3}},
                                                          "required": ["x"]}},
         ["{}", '{"x": 1}', '{"kind": "a", "x": 3}', '{"kind": "b", "x": 1}'],
         ['{"kind": "a"}', '{"kind": "a", "x": 2}'])
    case("if of a property that need not be there", {**both, "if": {"properties": {
        "kind": {"enum": ["a", "b"]}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
         ['{"x": 1}', '{"kind": "b", "x": 1}', '{"kind": "c", "y": ""}'],
         ["{}", '{"y": ""}', '{"kind": "a", "y": ""}', '{"kind": "c", "x": 1}'])
    case("then false", {**both, "if": is_a, "then": False}, ["{}", '{"kind": "b"}', '{"x": 1}'],
         ['{"kind": "a"}', '{"kind": "a", "x": 1}'])
    case("else false", {**both, "if": is_a, "else": False}, ['{"kind": "a"}', '{"kind":"a","x":1}'],
         ["{}", '{"kind": "b"}'])
    case("if a property is there", {**both, "if": {"required": ["x"]}, "then": {
        "required": ["y"]}, "else": {"properties": {"kind": {"const": "c"}}}},
         ['{"x": 1, "y": ""}', '{"kind": "a", "x": 1, "y": ""}', '{"kind": "c"}', "{}",
          '{"kind": "c", "y": ""}'], ['{"x": 1}', '{"kind": "a"}', '{"kind": "b", "y": ""}'])
    case("if of two properties", {**both, "if": {"properties": {
        "kind": {"const": "a"}, "x": {"enum": [1, 2]}}, "required": ["kind", "x"]},
        "then": {"required": ["y"]}, "required": ["x"], "properties": {
            "kind": kind, "x": {"enum": [1, 2, 3]}, "y": STR}},
         ['{"kind": "a", "x": 1, "y": ""}', '{"kind": "a", "x": 3}', '{"kind": "b", "x": 1}',
          '{"x": 2}'], ['{"kind": "a", "x": 2}', '{"kind": "a"}'])
    case("if of a string that is any", {**obj(kind=STR, x=INT), "required": ["kind"], "if": is_a,
                                        "then": {"required": ["x"]}},
         ['{"kind": "a", "x": 1}', '{"kind": "b"}', '{"kind": "ab"}', '{"kind": ""}'],
         ['{"kind": "a"}', "{}"], ['{"kind": "\\u0062"}'])
    case("if by $ref", {"$defs": {"k": kind, "c": is_a}, **obj(kind={"$ref": "#/$defs/k"}, x=INT),
                        "required": ["kind"], "if": {"$ref": "#/$defs/c"},
                        "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
         ['{"kind": "a", "x": 1}', '{"kind": "b"}'], ['{"kind": "a"}', '{"kind": "b", "x": 1}'])
    case("if of an optional property as Pydantic has it", {
        **obj(kind={"anyOf": [{"const": "a"}, NULL]}, x=INT), "if": is_a,
        "then": {"required": ["x"]}}, ['{"kind": "a", "x": 1}', '{"kind": null}', "{}"],
        ['{"kind": "a"}', '{"kind": "b"}'])
    case("if of null and booleans", {**obj(kind={"type": ["boolean", "null"]}, x=INT), "if": {
        "properties": {"kind": {"enum": [None, False]}}, "required": ["kind"]},
        "then": {"required": ["x"]}}, ['{"kind": true}', '{"kind": null, "x": 1}', '{"x": 1}'],
        ['{"kind": null}', '{"kind": false}'])
    case("if: 1 and 1.0 are equal", {**obj(kind={"enum": [1, 2.0]}, x=INT), "if": {"properties": {
        "kind": {"enum": [1.0, 2]}}, "required": ["kind"]}, "then": {"required": ["x"]}},
         ['{"kind": 1, "x": 1}', "{}"], ['{"kind": 1}', '{"kind": 2.0}'])
    many = {**obj(kind=kind, x=INT, y=STR, z=BOOL), "required": ["kind"], "allOf": [
        {"if": {"properties": {"kind": {"const": k}}}, "then": {"required": [n]}}
        for k, n in zip("abc", "xyz")]}
    case("allOf of if", many, ['{"kind": "a", "x": 1}', '{"kind": "b", "y": ""}',
                               '{"kind": "c", "x": 2, "z": true}'],
         ['{"kind": "a", "y": ""}', '{"kind": "b"}', '{"kind": "c", "x": 1}', '{"x": 1}'])
    case("allOf of many if", {**obj(kind={"enum": list(range(40))}, x={"type": "integer"}),
         "required": ["kind", "x"], "allOf": [{"if": {"properties": {"kind": {"const": k}}},
                                               "then": {"properties": {"x": {"const": k}}}}
                                              for k in range(40)]},
         [f'{{"kind": {k}, "x": {k}}}' for k in range(40)],
         ['{"kind": 1, "x": 2}', '{"kind": 39, "x": 0}', '{"kind": 40, "x": 40}'])
    case("else if", {**both, "required": ["kind"], "if": is_a, "then": {"required": ["x"]},
                     "else": {"if": {"properties": {"kind": {"const": "b"}}}, "then": {
                         "required": ["y"]}, "else": {"required": ["x", "y"]}}},
         ['{"kind": "a", "x": 1}', '{"kind": "b", "y": ""}', '{"kind": "c", "x": 1, "y": ""}'],
         ['{"kind": "a"}', '{"kind": "b", "x": 1}', '{"kind": "c", "y": ""}'])
    case("if beside other types", {"type": ["object", "null"], "properties": {
        "kind": kind, "x": INT}, "if": is_a, "then": {"required": ["x"]}, "else": {
            "required": ["kind"]}}, ["null", '{"kind": "a", "x": 1}', '{"kind": "b"}'],
         ["{}", '{"kind": "a"}', "1"])
    case("if of a property that may not be there", {"type": "object", "properties": {"x": INT},
         "additionalProperties": False, "if": is_a, "then": {"required": ["x"]},
         "else": {"properties": {"x": {"minimum": 3}}}}, ["{}", '{"x": 3}'],
         ['{"x": 2}', '{"kind": "a", "x": 5}'])
    case("if of one of the others", {"type": "object", "properties": {"x": INT}, "if": is_a,
         "additionalProperties": {"enum": ["a", "b"]}, "then": {"required": ["x"]}},
         ['{"x": 1, "kind": "a"}', '{"kind": "b"}', '{"o": "a"}'],
         ['{"kind": "a"}', '{"kind": "c"}', '{"o": "c"}'])
    case("if of an object that is open", {"type": "object", "if": is_a,
                                          "then": {"required": ["x"]}},
         ['{"kind": "a", "x": 1}', "{}", '{"y": 1}', '{"kind": 3}', '{"kind": null, "z": 1}'],
         ['{"kind": "a"}', '{"kind": "a", "y": 1}'])
    case("if true", {**both, "if": True, "then": {"required": ["x"]}, "else": False},
         ['{"x": 1}'], ["{}"])
    case("then and else without if describe", {**both, "then": False, "else": False}, ["{}"])
    case("then without if describes its part", {**both, "if": is_a, "allOf": [
        {"then": {"required": ["x"]}}]}, ['{"kind": "a"}', "{}"])
    case("unevaluatedProperties across then", {**obj(kind=kind), "required": ["kind"], "if": is_a,
         "then": {"properties": {"x": INT}}, "unevaluatedProperties": False},
         ['{"kind": "a", "x": 1}', '{"kind": "b"}'], ['{"kind": "b", "x": 1}',
                                                      '{"kind": "a", "y": 1}'])
    refused("if of an undeclared one beside unevaluatedProperties", {
        **obj(x=INT), "if": is_a, "then": {}, "unevaluatedProperties": False},
            "unevaluatedProperties")
    refused("then of what is not allowed", {**both, "if": is_a, "then": {"properties": {"z": INT}}},
            "additionalProperties")
    case("if of a type", {"if": {"type": "integer"}, "then": {"minimum": 3}},
         ["3", "50", "2.5", "-0.125", '"x"', "null", "{}", "[2]", "true"], ["2", "-1", "2.0"],
         ["3.0", "1e3", "2.50"])
    case("if of a type among several", {"type": ["string", "object", "null"], "if": {
        "type": ["string", "null"]}, "then": {"maxLength": 1}, "else": {"required": ["a"]}},
         ['"x"', '""', "null", '{"a": 1}'], ['"xy"', "{}", "1"])
    case("if of objects among several types", {"type": ["object", "null", "integer"], "if": {
        "type": "object", "required": ["a"]}, "then": {"properties": {"a": INT}},
        "else": {"minimum": 3}}, ['{"a": 1}', "null", "3", "{}", '{"b": 1}'],
         ['{"a": ""}', "2", '"x"'])
    case("if of objects beside other types", {"if": {"type": "object", "required": ["a"]},
         "then": {"maxProperties": 1}, "else": {"type": "string"}},
         ['{"a": 1}', '"x"'], ["{}", "1", '{"a": 1, "b": 1}'])
    case("if of a bound", {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 5},
                           "else": {"multipleOf": 2}}, ["10", "15", "8", "0", "-2"],
         ["12", "5", "9", "-5"])
    case("if of a bound of any number", {"type": "number", "if": {"exclusiveMaximum": 0.5},
                                         "then": {"maximum": 0}},
         ["0", "-1.5", "0.5", "0.75", "3"], ["0.25", "0.4999", "0.1"], ["1e3"])
    case("if of two bounds", {"type": ["integer", "null"], "if": {"minimum": 3, "maximum": 7},
                              "then": {"multipleOf": 2}, "else": {"maximum": 9}},
         ["4", "6", "2", "8", "9", "-1", "null"], ["3", "5", "7", "10"])
    case("if of a length", {"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3},
                         "else": {"pattern": "^[a-c]$"}},
         ['"ab"', '"éxy"', '"éé"', '"b"'], ['""', '"d"', '"abcd"', '"😀"'])
    case("if of counts", {"type": ["array", "object"], "properties": {"a": INT, "b": INT},
                          "items": INT, "if": {"minItems": 2, "maxProperties": 1},
                          "then": {"maxItems": 3, "required": ["b"]}},
         ["[]", "[1]", "[1, 2]", "[1, 2, 3]", '{"b": 1}', '{"a": 1, "b": 2}'],
         ["[1, 2, 3, 4]", "{}", '{"a": 1}'])
    case("if of a count that any has", {"type": "array", "if": {"minItems": 0},
                                        "then": {"maxItems": 1}}, ["[]", "[1]"], ["[1, 2]"])
    age = {**obj(age={"type": "integer", "minimum": 0}, guardian=STR), "required": ["age"]}
    minor = {"if": {"properties": {"age": {"exclusiveMaximum": 18}}},
             "then": {"required": ["guardian"]}}
    case("if of a bound of a property", {**age, **minor},
         ['{"age": 18}', '{"age": 17, "guardian": ""}', '{"age": 120, "guardian": "x"}'],
         ['{"age": 17}', '{"age": 0}', "{}", '{"age": -1}'])
    case("ifs of ranges", {**obj(n={"type": "integer", "minimum": 0, "maximum": 29}, x=INT),
         "required": ["n", "x"], "additionalProperties": False, "allOf": [
             {"if": {"properties": {"n": {"minimum": 10 * k, "maximum": 10 * k + 9}}},
              "then": {"properties": {"x": {"const": k}}}} for k in range(3)]},
         ['{"n": 0, "x": 0}', '{"n": 10, "x": 1}', '{"n": 19, "x": 1}', '{"n": 29, "x": 2}'],
         ['{"n": 9, "x": 1}', '{"n": 10, "x": 0}', '{"n": 30, "x": 2}', '{"n": 5}'])
    case("if of many ranges", {**obj(n=INT, x=INT), "required": ["n", "x"], "allOf": [
        {"if": {"properties": {"n": {"minimum": k}}}, "then": {"properties": {"x": {"minimum": k}}}}
        for k in range(24)]}, ['{"n": 3, "x": 3}', '{"n": -1, "x": -5}', '{"n": 90, "x": 23}'],
        ['{"n": 3, "x": 2}', '{"n": 30, "x": 22}'])
    case("if of a type and a bound of a property", {**obj(v={"type": ["integer", "string"]}, x=INT),
         "if": {"properties": {"v": {"type": "integer", "minimum": 5}}, "required": ["v"]},
         "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
         ["{}", '{"v": 4}', '{"v": "a"}', '{"v": 5, "x": 1}'],
         ['{"v": 5}', '{"v": 4, "x": 1}', '{"v": "a", "x": 1}', '{"x": 1}'])
    case("if of not", {**both, "if": {"not": is_a}, "then": {"required": ["y"]},
                       "else": {"required": ["x"]}},
         ['{"y": ""}', '{"kind": "b", "y": ""}', '{"kind": "a", "x": 1}'],
         ["{}", '{"kind": "a", "y": ""}', '{"kind": "b", "x": 1}'])
    case("if of a number that is any", {**obj(kind=INT, x=INT), "required": ["kind"], "if": {
        "properties": {"kind": {"enum": [1, 3, 4.0]}}}, "then": {"required": ["x"]}},
         ['{"kind": 2}', '{"kind": 0}', '{"kind": 5}', '{"kind": 1, "x": 0}', '{"kind": -7}'],
         ['{"kind": 1}', '{"kind": 3}', '{"kind": 4}'])
    case("if of each of many types", {**obj(v={"type": ["string", "integer", "null"]}),
         "required": ["v"], "allOf": [{"if": {"type": "object", "properties": {
             "v": {"type": t}}}, "then": {"properties": {"v": {c: v}}}}
             for t, c, v in (("string", "maxLength", 1), ("integer", "minimum", 7),
                             ("null", "maximum", 3), ("boolean", "const", 1)) for _ in range(5)]},
         ['{"v": "a"}', '{"v": 7}', '{"v": null}'], ['{"v": "ab"}', '{"v": 6}', '{"v": true}'])
    refused("if", {**both, "if": {"properties": {"kind": {"pattern": "a"}}}, "then": {}}, "if")
    refused("if", {**both, "if": {"not": {"pattern": "a"}}, "then": {}}, "if")
    refused("if", {**both, "if": {"properties": {"x": {"minimum": "3"}}}, "then": {}}, "if")
    refused("if", {**both, "if": {"properties": {"x": {"properties": {"y": {"const": 1}}}}},
                   "then": {}}, "if")
    refused("if of many facts", {**both, "if": {"required": [str(i) for i in range(17)]},
                                 "then": {}}, "if")
    refused("if that leaves nothing", {**both, "if": is_a, "then": False, "else": False}, "if")
    refused("if of an anyOf that has one, too", {**both, "if": is_a, "anyOf": [
        {"if": {"pattern": "a"}, "then": {}}]}, "if")


def negations():
    ab = {**obj(a=INT, b=INT, c=INT), "additionalProperties": False}
    case("not beside an enum", {"enum": ["a", "b", 1, None, [1]], "not": {"enum": ["a", 1.0, [1]]}},
         ['"b"', "null"], ['"a"', "1", "[1]"])
    case("not beside a const", {"const": "a", "not": {"const": "b"}}, ['"a"'], ['"b"'])
    case("not of a type beside an enum", {"enum": ["a", 1, 2.0, 2.5, None], "not": {
        "type": ["integer", "null"]}}, ['"a"', "2.5"], ["1", "2.0", "null"])
    case("not of a string", {"type": "string", "not": {"enum": ["", "ab", "b", 3, 'q"']}},
         ['"a"', '"abc"', '"ba"', '"é"'], ['""', '"ab"', '"b"', '"q\\""'], ['"\\n"'])
    case("not of null", {"not": {"const": None}}, ['"a"', "1", "{}", "[null]", "true"], ["null"])
    case("not of a boolean", {"type": ["boolean", "integer"], "not": {"const": True}},
         ["false", "1"], ["true"])
    case("not of a type", {"type": ["integer", "string", "null"], "not": {"type": "null"}},
         ["1", '"a"'], ["null", "true"])
    case("not of a type beside any", {"not": {"type": ["string", "number"]}},
         ["{}", "[1]", "null", "true"], ['"a"', "1", "1.5"])
    case("not of numbers beside integers", {"type": ["integer", "array"], "not": {
        "type": "number"}}, ["[]"], ["1"])
    case("not of a value of another type", {"type": "integer", "minimum": 3, "not": {"const": "a"}},
         ["3"], ["2"])
    case("two nots", {"type": "string", "allOf": [{"not": {"const": "a"}}, {"not": {"enum": ["b"]}},
                                                  {"not": {"type": "null"}}]},
         ['"c"', '"ab"'], ['"a"', '"b"'])
    case("not of anyOf", {"type": ["string", "null"], "not": {"anyOf": [{"const": "a"},
                                                                       {"type": "null"}]}},
         ['"b"'], ['"a"', "null"])
    case("not of a property", {**ab, "not": {"required": ["a"]}}, ["{}", '{"b": 1, "c": 2}'],
         ['{"a": 1}', '{"a": 1, "b": 2}'])
    case("not of properties together", {**ab, "not": {"required": ["a", "b", "c"]}},
         ["{}", '{"a": 1}', '{"a": 1, "b": 1}', '{"b": 1, "c": 1}', '{"a": 1, "c": 1}'],
         ['{"a": 1, "b": 1, "c": 1}'])
    case("not of one with one required", {**ab, "required": ["a"], "not": {"required": ["a", "b"]}},
         ['{"a": 1}', '{"a": 1, "c": 1}'], ["{}", '{"a": 1, "b": 1}'])
    case("not of either property", {**ab, "not": {"anyOf": [{"required": ["a"]},
                                                            {"required": ["b", "c"]}]}},
         ["{}", '{"b": 1}', '{"c": 1}'], ['{"a": 1}', '{"b": 1, "c": 1}'])
    case("not of allOf", {**ab, "not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}},
         ["{}", '{"b": 1, "c": 1}', '{"a": 1}'], ['{"a": 1, "b": 1}'])
    case("nots of properties", {**ab, "allOf": [{"not": {"required": ["a", "b"]}},
                                                {"not": {"required": ["b", "c"]}}]},
         ["{}", '{"b": 1}', '{"a": 1, "c": 1}'], ['{"a": 1, "b": 1}', '{"b": 1, "c": 1}'])
    case("not of a property's value", {**obj(a={"enum": [1, 2]}, b=INT), "not": {
        "properties": {"a": {"const": 1}}, "required": ["a", "b"]}},
         ["{}", '{"a": 1}', '{"a": 2, "b": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}'])
    case("not of a property in an open object", {"type": "object", "not": {"required": ["a"]}},
         ["{}", '{"b": 1}', '{"ab": 1}'], ['{"a": 1}', '{"b": 1, "a": 2}'])
    case("not of a property is of objects", {"type": ["object", "null"], "not": {
        "required": ["a"]}}, ["{}"], ["null", '{"a": 1}'])
    case("not by $ref", {"$defs": {"n": {"const": "a"}}, "type": "string", "not": {
        "$ref": "#/$defs/n"}}, ['"b"'], ['"a"'])
    case("not in branches", {"anyOf": [{"type": "string", "not": {"const": "a"}}, {"type": "null"}],
         "not": {"const": "b"}}, ['"c"', "null"], ['"a"', '"b"'])
    case("a plain not and another", {**ab, "not": {"type": "null"}, "allOf": [
        {"not": {"required": ["a"]}}, {"not": {"type": "string"}}]}, ['{"b": 1}'], ['{"a": 1}'])
    case("if beside not", {**ab, "not": {"required": ["b"]}, "if": {"required": ["a"]},
         "then": {"not": {"required": ["c"]}}, "else": {"required": ["c"]}},
         ['{"a": 1}', '{"c": 1}'], ["{}", '{"a": 1, "c": 1}', '{"b": 1}'])
    case("uniqueItems of what not leaves", {"type": "array", "uniqueItems": True, "items": {
        "enum": ["a", "b", "c"], "not": {"const": "b"}}}, ['["a", "c"]', "[]"],
         ['["b"]', '["a", "a"]'])
    case("not of true and of false", {"anyOf": [{"type": "null", "not": True},
                                                {"type": "integer", "not": False}]},
         ["1"], ["null"])
    refused("not of all there is", {"type": "integer", "not": True}, "not")
    case("not of an integer beside numbers", {"type": ["number", "null"], "not": {
        "type": "integer"}}, ["2.5", "-0.000001", "999999999.5", "null"],
         ["2", "2.0", "0", "-0.0", '"x"', "1e3"], ["2.50", "1234567890.5", "0.0000001", "25e-1"])
    refused("not of integers beside bounds", {"type": "number", "minimum": 3, "not": {
        "type": "integer"}}, "minimum")
    refused("not of integers and of others", {"type": "number", "not": {"anyOf": [
        {"type": "integer"}, {"const": 2.5}]}}, "not")
    case("not of a number", {"type": "integer", "not": {"const": 1}}, ["0", "2", "-1", "10"], ["1"])
    case("not of numbers", {"type": ["number", "string"], "minimum": 0, "not": {"enum": [
        3, 0.5, -7, 3.0]}}, ["0", "0.25", "2.999", "3.5", "4", '"3"'],
         ["0.5", "3", "3.0", "3.00", "0.50", "-1"], ["1e3"])
    case("not of numbers beside any", {"not": {"const": 0}}, ["1", "-1", "0.5", '"0"', "null"],
         ["0", "-0", "0.0"], ["1e3"])
    refused("not of many numbers", {"type": "integer", "not": {"enum": list(range(0, 130, 2))}},
            "not")
    case("not of a bound", {"type": "integer", "not": {"minimum": 3}}, ["2", "-5"], ["3", "4"])
    case("not of a bound is of its type", {"type": ["integer", "null"], "not": {"maximum": 3}},
         ["4"], ["3", "null"])
    case("not of bounds", {"type": "integer", "not": {"minimum": 3, "maximum": 5}},
         ["2", "6", "-5"], ["3", "4", "5"])
    case("not of a length", {"type": "string", "not": {"maxLength": 2}}, ['"abc"'],
         ['""', '"ab"', '"😀"'])
    case("not of an empty array", {"type": "array", "items": INT, "not": {"maxItems": 0}},
         ["[1]", "[1, 2]"], ["[]"])
    case("not of a bound of a property", {**ab, "not": {"properties": {"a": {"minimum": 3}},
                                                        "required": ["a"]}},
         ["{}", '{"a": 2}', '{"b": 1}'], ['{"a": 3}', '{"a": 4, "b": 1}'])
    case("not of not", {"type": ["string", "null"], "not": {"not": {"const": "a"}}}, ['"a"'],
         ['"b"', "null"])
    case("not of a bound among an enum", {"enum": [1, 5, "a", None], "not": {"minimum": 3}},
         ["1"], ["5", '"a"', "null"])
    refused("not of an object", {"type": "object", "not": {"const": {}}}, "not")
    refused("not of all there is", {"type": "null", "not": {"const": None}}, "not")
    refused("not of all there is", {"not": {}}, "not")
    refused("not of strings beside lengths", {"type": "string", "minLength": 1,
                                              "not": {"const": "a"}}, "minLength")
    refused("not of a pattern", {"type": "string", "not": {"pattern": "a"}}, "not")
    refused("not of not", {"type": "string", "not": {"not": {"pattern": "(?=a)"}}}, "(?")
    refused("not of an unknown type", {"type": "string", "not": {"type": "odd"}}, "not")
    refused("not of a list of types that repeats itself", {"type": "string", "not": {
        "type": ["null"] * 8}}, "not")
    refused("a list of types that repeats itself", {"type": "string", "allOf": [
        {"type": ["null", "string"] * 4}]}, "type has 8 names")
    refused("not of items", {"type": "array", "not": {"items": INT}}, "not")
    refused("not of a long string", {"type": "string", "not": {"const": "a" * 1025}}, "not")
    refused("uniqueItems beside not", {"type": "array", "uniqueItems": True, "items": {
        "type": "boolean", "not": {"minimum": 3}}}, "not")


def nothing():
    """Parts that allow nothing are taken out of what allows something."""
    never = {**obj(a={"$ref": "#/$defs/n"}), "required": ["a"]}
    none = {"type": "integer", "minimum": 3, "maximum": 2}
    case("a part of nothing", {"anyOf": [none, NULL, False, {"type": "integer", "enum": ["x"]}]},
         ["null"], ["2", "3", '"x"'])
    case("a part that not empties", {"anyOf": [INT, {"not": {}}]}, ["1"], ['"x"', "null"])
    case("a part that never ends", {"$defs": {"n": never}, "anyOf": [{"$ref": "#/$defs/n"}, NULL]},
         ["null"], ['{"a": {}}'])
    case("a part that ends in another way", {"$defs": {"n": {"anyOf": [
        never, {**obj(b={"$ref": "#/$defs/n"}, c=none), "additionalProperties": False}]}},
        "$ref": "#/$defs/n"}, ["{}", '{"b": {}}', '{"a": {"b": {}}}'], ['{"c": 1}', '{"a": 1}'])
    case("an optional property of nothing", {**obj(a={"type": "string", "minLength": 3,
         "maxLength": 2}, b=INT), "additionalProperties": BOOL},
         ["{}", '{"b": 1}', '{"b": 1, "c": true}'], ['{"a": "abc"}', '{"a": true}'])
    case("a property of nothing by $ref and allOf", {"$defs": {"n": {"allOf": [
        {"const": 1}, {"const": 2}]}}, **obj(a={"$ref": "#/$defs/n"}, b={"anyOf": [
            {"$ref": "#/$defs/n"}, INT]})}, ["{}", '{"b": 3}'], ['{"a": 1}', '{"b": "x"}'])
    case("others of nothing", {"type": "object", "additionalProperties": none}, ["{}"],
         ['{"a": 3}'])
    case("names of nothing", {"type": "object", "propertyNames": {"type": "integer"}}, ["{}"],
         ['{"a": 1}'])
    case("names of nothing beside properties", {**obj(a=INT), "propertyNames": {"type": "null"}},
         ["{}"], ['{"a": 1}'])
    case("items of nothing", {"type": "array", "items": none}, ["[]"], ["[3]", "[1, 2]"])
    case("prefixItems of nothing", {"type": "array", "prefixItems": [INT, none, STR]},
         ["[]", "[1]"], ["[1, 3]", '[1, 3, "x"]'])
    case("a type of nothing", {"type": ["object", "array", "null"], "properties": {"a": False},
                               "required": ["a"], "minItems": 2, "maxItems": 1},
         ["null"], ["{}", "[]", '{"a": 1}'])
    case("counts of nothing", {"anyOf": [{"type": "object", "minProperties": 2,
         "maxProperties": 1}, {**obj(a=INT), "additionalProperties": False, "minProperties": 2},
        {"type": "array", "minItems": 2, "maxItems": 1}, {"type": "array", "contains": STR,
         "maxItems": 0}, NULL]}, ["null"], ["{}", '{"a": 1}', "[]", "[1]"])
    case("numbers of nothing", {"anyOf": [{"type": "integer", "multipleOf": 10, "minimum": 1,
         "maximum": 9}, {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.5},
        {"type": "integer", "minimum": 1.1, "maximum": 1.9}, NULL]}, ["null"],
         ["1", "0.5", "10", "5", "2"])
    case("a condition that no object keeps to", {"type": ["object", "null"], "properties": {
        "kind": {"enum": ["b"]}, "x": INT}, "if": {"properties": {"kind": {"const": "a"}},
                                                   "required": ["kind"]},
        "then": {"type": "null"}, "else": {"required": ["x"]}},
         ["null", '{"x": 1}', '{"kind": "b", "x": 1}'], ["{}", '{"kind": "a", "x": 1}'])
    case("then that no object keeps to", {"type": ["object", "null"], "properties": {
        "kind": False}, "if": {"properties": {"kind": {"enum": [1, 2]}}},
         "then": {"required": ["kind"]}}, ["null"], ["{}", '{"kind": 1}'])
    case("not of allOf that leaves nothing of one", {**obj(a={"const": 1}, b=INT), "required": [
        "a"], "not": {"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["b"]}]}},
         ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}"])
    refused("a required property of nothing", {**obj(b=INT, a=none), "required": ["a"]}, "minimum")
    refused("an item of nothing", {"type": "array", "items": none, "minItems": 1}, "minimum")
    refused("all parts of nothing", {"anyOf": [{"type": "integer", "enum": ["x"]}, none]}, "enum")
    refused("what never ends", {"$defs": {"n": never}, "$ref": "#/$defs/n"}, "never end")
    refused("a part of a type that there is not", {"type": "object", "anyOf": [
        {"type": "objet"}, {"minProperties": 1}]}, "objet")
    refused("a part of a type that there is not", {"anyOf": [
        {"enum": ["a"], "type": ["string", "odd"]}, NULL]}, "odd")
    refused("a part of numbers that are not ours", {"anyOf": [{"type": "number", "minimum": 1e17},
                                                              NULL]}, "digits")
    refused("a part of names that are not ours", {"anyOf": [{"type": "object",
            "minProperties": 2}, NULL]}, "told apart")
    refused("names that are not ours beside a property of nothing", {"anyOf": [
        {"type": "object", "properties": {"a": none}, "additionalProperties": True,
         "minProperties": 2}, NULL]}, "told apart")
    refused("a part of what is not read", {"anyOf": [NULL, {"type": "string", "pattern": "(?!x)",
                                                            "minLength": 3}]}, "(?")


def drafts():
    """What older drafts have."""
    seven = {"$schema": "http://json-schema.org/draft-07/schema#"}
    newest = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    for draft in ({}, seven, newest):
        case("dependencies", {**draft, **obj(a=INT, b=INT, c=INT), "dependencies": {
            "a": ["b"], "c": {"properties": {"b": {"minimum": 3}}, "required": ["b"]}}},
             ["{}", '{"b": 1}', '{"a": 1, "b": 1}', '{"b": 3, "c": 1}', '{"a": 1, "b": 4, "c": 1}'],
             ['{"a": 1}', '{"c": 1}', '{"b": 1, "c": 1}', '{"a": 1, "b": 2, "c": 1}'])
    case("dependencies of nothing and no more", {**seven, **obj(a=INT, b=INT), "dependencies": {
        "a": False, "b": []}}, ["{}", '{"b": 1}'], ['{"a": 1}', '{"a": 1, "b": 1}'])
    case("dependencies beside dependentRequired", {**obj(a=INT, b=INT, c=INT), "dependencies": {
        "a": ["b"]}, "dependentRequired": {"a": ["c"]}}, ["{}", '{"a": 1, "b": 1, "c": 1}'],
         ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'])
    case("definitions", {**seven, "definitions": {"n": INT, "k": {"enum": ["a"]}}, **obj(
        a={"$ref": "#/definitions/n"}, b={"$ref": "#/definitions/k"})}, ['{"a": 1, "b": "a"}'],
         ['{"a": "a"}', '{"b": 1}'])
    for draft in ({}, seven):
        case("items as an array", {**draft, "type": "array", "items": [INT, STR, False]},
             ["[]", "[1]", '[1, "x"]'], ['["x"]', "[1, 2]", '[1, "x", 3]'])
        case("additionalItems", {**draft, "items": [INT], "additionalItems": STR},
             ["[]", "[1]", '[1, "x", "y"]'], ["[1, 2]", '["x"]'])
        case("additionalItems false", {**draft, "type": "array", "items": [INT, STR],
                                       "additionalItems": False, "minItems": 2},
             ['[1, "x"]'], ["[1]", '[1, "x", 3]', "[]"])
    case("an array of items without schemas", {"type": "array", "items": [],
                                               "additionalItems": INT}, ["[1, 2]"], ['["x"]'])
    case("additionalItems beside a schema say nothing", {
        "items": INT, "additionalItems": False}, ["[1, 2]"], ['["x"]'])
    case("additionalItems alone say nothing", {"type": "array", "additionalItems": False}, ["[1]"])
    case("an array of items in allOf", {"type": "array", "allOf": [
        {"items": [INT, STR], "additionalItems": False}, {"minItems": 1},
        {"additionalItems": STR}]}, ["[1]", '[1, "x"]'], ["[]", '[1, "x", "y"]', "[1, 2]"])
    case("an array of items by $ref", {"definitions": {"p": {
        "items": [{"type": "number"}, {"type": "number"}], "additionalItems": False,
        "minItems": 2}}, "type": "array", "items": {"$ref": "#/definitions/p"}},
         ["[]", "[[1, 2.5], [0, 0]]"], ["[[1]]", "[[1, 2, 3]]"], ["[1, 2]"])
    refused("arrays of items that differ", {"type": "array", "allOf": [
        {"items": [INT]}, {"items": [STR]}]}, "prefixItems")
    refused("an array of items and a schema", {"type": "array", "items": INT,
                                               "allOf": [{"items": [INT]}]}, "items")
    refused("an array of items beside prefixItems", {"items": [INT], "prefixItems": [INT]},
            "prefixItems")
    refused("an array of items that are no schemas", {"items": [3]}, "schema")
    refused("dependencies of neither", {"dependencies": {"a": 3}}, "dependencies")
    refused("dependencies of many", {"dependencies": {c: ["z"] for c in "abcdef"}}, "dependencies")
    refused("dependencies that differ", {"type": "object", "allOf": [
        {"dependencies": {"a": ["b"]}}, {"dependencies": {"a": ["c"]}}]}, "dependencies")


def refusals():
    refused("refused in a part of allOf", {"allOf": [INT, {"not": {}}]}, "not")
    refused("refused beside $ref", {"$defs": {"a": INT}, "$ref": "#/$defs/a", "not": {}}, "not")
    case("what only describes", {"title": "T", "description": "d", "$comment": "c", "default": 5,
                                 "examples": [1], "deprecated": True, "readOnly": True,
                                 "x-order": 3, "type": "integer"}, ["1"], ['"x"'])


def some(rng, of, n):
    return rng.sample(of, rng.randrange(n + 1))


VALUES = ["a", "bb", 1, 1.0, 2.5, None, True, {"a": 1}, ["x"]]


def plain(rng):
    return rng.choice([{"enum": some(rng, VALUES, 3)}, {"const": rng.choice(VALUES)},
                       {"type": rng.choice(["string", "null", "array", ["null", "integer"]])},
                       {"anyOf": [{"const": rng.choice(VALUES)}, {"type": "boolean"}]}])


def condition(rng):
    """What `if` and `not` may be, and what they may not."""
    out = {"properties": {n: rng.choice([{"const": rng.choice(VALUES)}, {"enum": VALUES[:3]}, True])
                          for n in some(rng, WORDS, 2)},
           "required": some(rng, WORDS, 2), "type": "object", "minimum": 1,
           "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "pattern": "a", "maxLength": 2,
           "minItems": 1}
    keep = rng.choice([["properties", "required"], ["properties"], ["required"],
                       ["properties", "required", "type"], ["anyOf"], ["minimum"], ["maxLength"],
                       ["pattern"], ["minItems", "minimum"]])
    return {k: out[k] for k in keep}


def wild(rng, depth):
    """A schema of a few keywords of any kind, whether they go together or not."""
    if depth <= 0 or rng.random() < 0.05:
        return rng.choice([True, INT, STR, BOOL, NULL, {}, {"const": "a"}, {"type": "number"}])
    def sub(): return wild(rng, depth - 1)
    def subs(): return [sub() for _ in range(rng.randrange(1, 3))]
    def named(): return {n: sub() for n in some(rng, WORDS, 3)}
    def bound(): return rng.choice([0, 1, -3, 2.5, 0.1, 7])
    pool = {
        "type": lambda: rng.choice(["object", "array", "object", "array", "string", "number",
                                    "integer", ["object", "null"], ["array", "integer"]]),
        "enum": lambda: some(rng, ["a", "bb", 1, 2.5, None, {"a": 1}, ["x"]], 4) or ["a"],
        "const": lambda: rng.choice(["a", 3, None]),
        "minimum": bound, "maximum": bound, "exclusiveMinimum": bound, "exclusiveMaximum": bound,
        "multipleOf": lambda: rng.choice([1, 2, 3, 0.5, 10]),
        "minLength": lambda: rng.randrange(3), "maxLength": lambda: rng.randrange(1, 5),
        "pattern": lambda: rng.choice(PATTERNS), "format": lambda: rng.choice(["date", "odd"]),
        "properties": named, "additionalProperties": sub, "unevaluatedProperties": sub,
        "patternProperties": lambda: {p: sub() for p in some(rng, PATTERNS, 2)},
        "propertyNames": lambda: rng.choice([{"maxLength": 2}, {"pattern": "^[ab]"}, True, False,
                                             {"enum": ["a", "b"]}]),
        "dependencies": lambda: {n: rng.choice([some(rng, WORDS, 2), sub()])
                                 for n in some(rng, WORDS, 2)},
        "not": lambda: rng.choice([condition, plain])(rng),
        "if": lambda: condition(rng), "then": sub, "else": sub,
        "required": lambda: some(rng, WORDS, 2),
        "minProperties": lambda: rng.randrange(3), "maxProperties": lambda: rng.randrange(4),
        "dependentRequired": lambda: {n: some(rng, WORDS, 2) for n in some(rng, WORDS, 2)},
        "dependentSchemas": named,
        "items": lambda: sub() if rng.random() < 0.7 else subs(), "additionalItems": sub,
        "prefixItems": subs, "unevaluatedItems": sub, "contains": sub,
        "minItems": lambda: rng.randrange(3), "maxItems": lambda: rng.randrange(1, 4),
        "uniqueItems": lambda: rng.random() < 0.8, "minContains": lambda: rng.randrange(3),
        "maxContains": lambda: rng.randrange(3),
        "allOf": subs, "anyOf": subs, "$ref": lambda: "#/$defs/" + rng.choice("xy"),
    }
    keys = rng.sample(OF_OBJECTS if rng.random() < 0.4 else sorted(pool), rng.randrange(1, 5))
    return {k: pool[k]() for k in keys}


WORDS = ["a", "ab", "b", "q\"", "é"]
PATTERNS = ["^a", "b$", "^[ab]{1,2}$", ".", "\""]
OF_OBJECTS = ["properties", "additionalProperties", "patternProperties", "propertyNames",
"required",
              "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "allOf",
              "anyOf", "unevaluatedProperties", "dependencies", "not", "if", "then", "else"]


def check_wild(program, seed, wrong):
    """Whatever is taken makes valid outputs alone."""
    rng = random.Random(seed)
    n = n_rounds(150, 500, 1500)
    schemas = []
    for _ in range(n):
        schema, defs = wild(rng, 3), {"x": wild(rng, 1), "y": wild(rng, 1)}
        schemas.append({**(schema if isinstance(schema, dict) else {}), "$defs": defs})
    answers, n_taken = walk(program, seed, schemas, [[] for _ in schemas]), 0
    for schema, answer in zip(schemas, answers):
        text = json.dumps(schema)
        if "unevaluatedProperties" in text and "additionalProperties" in text:
            continue  # python3-jsonschema before 4.18 is wrong about the two together
        if "unevaluatedItems" in text and '"items": [' in text:
            continue  # which draft 2020-12 does not have together
        n_taken += "error" not in answer
        validators = Validators(schema)
        for t in answer.get("outputs", ()):
            try:
                valid = validators.valid(t)
            except TypeError:
                continue  # python3-jsonschema 4.10 sorts items that have no order, to name them
            if not valid:
                wrong.append(f"{text} made {t}")
    return n, n_taken


DOMAIN = {"k": ["a", "bb", "c"], "x": [1, 2], "y": [True, None]}
BOUNDS = {"k": [{"maxLength": 1}, {"minLength": 2}, {"type": "string"}],
          "x": [{"minimum": 2}, {"type": "integer", "maximum": 1}, {"exclusiveMinimum": 2}],
          "y": [{"type": "null"}, {"type": ["boolean", "string"]}, False]}
OBJECTS = [{n: v for n, v in zip(DOMAIN, values) if v != "absent"}
           for values in itertools.product(*(v + ["absent"] for v in DOMAIN.values()))] + [None]


def says(rng):
    """Of a small object: a condition, or what `then` may be."""
    named = some(rng, list(DOMAIN), 2)
    values = {n: rng.choice([{"enum": some(rng, DOMAIN[n], 2)}, {"const": rng.choice(DOMAIN[n])},
                             rng.choice(BOUNDS[n])]) for n in named if rng.random() < 0.7}
    out = {"properties": {n: v for n, v in values.items() if v != {"enum": []}},
           "required": [n for n in named if rng.random() < 0.7],
           "type": rng.choice([None] * 5 + ["object", ["null", "string"]]),
           "maxProperties": rng.choice([None] * 8 + [1])}
    return {k: v for k, v in out.items() if v}


def ruled(rng, depth):
    """Some keywords of conditions, each of which is supported."""
    pool = {
        "if": lambda: says(rng), "then": lambda: ruled(rng, depth - 1),
        "else": lambda: ruled(rng, depth - 1),
        "not": lambda: rng.choice([says(rng), {"anyOf": [says(rng), says(rng)]},
                                   {"allOf": [says(rng), says(rng)]}, {"not": says(rng)}]),
        "allOf": lambda: [ruled(rng, depth - 1) for _ in range(rng.randrange(1, 4))],
        "anyOf": lambda: [ruled(rng, depth - 1) for _ in range(rng.randrange(1, 3))],
        "dependencies": lambda: {n: rng.choice([some(rng, list(DOMAIN), 2), says(rng), False])
                                 for n in some(rng, list(DOMAIN), 2)},
    }
    keys = rng.sample(sorted(pool), rng.randrange(1, 4)) if depth else []
    if rng.random() < 0.7 and {"then", "else"} & set(keys):
        keys.append("if")
    return {**(says(rng) if rng.random() < 0.5 else {}), **{k: pool[k]() for k in keys}}


def check_conditions(program, seed, wrong):
    """Every object of a small domain, and null: taken where it is valid, and nowhere else."""
    rng = random.Random(seed)
    n, n_taken, n_texts = n_rounds(150, 400, 1000), 0, [0, 0]
    base = {"properties": {k: {"enum": v} for k, v in DOMAIN.items()},
            "additionalProperties": False}
    schemas = [{"type": rng.choice(["object", ["object", "null"]]), **base,
                "allOf": [ruled(rng, 2)]} for _ in range(n)]
    texts = [json.dumps(o) for o in OBJECTS]
    for schema, answer in zip(schemas, walk(program, seed, schemas, [texts for _ in schemas])):
        validator = Validators(schema).double
        valid = [validator.is_valid(o) for o in OBJECTS]
        if "error" in answer:
            continue
        n_taken += 1
        for text, taken, ok in zip(texts, answer["taken"], valid):
            n_texts[ok] += 1
            if taken != ok:
                wrong.append(f"{json.dumps(schema)} {'takes' if taken else 'does not take'} {text}")
    return n, n_taken, n_texts


# Numbers as we write them where there are bounds: docs/use.md.
WRITTEN = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,16})?|-?[1-9]\d{15}")


def exclusive_gap(bound):
    """A unit of the 15th digit, of the 16th place at least."""
    return max(Decimal(1).scaleb(-16), Decimal(1).scaleb(bound.adjusted() - 14)
               if bound else Decimal(0))


def is_ours(schema, text):
    """By plain decimals: is the text an output?"""
    value = Decimal(text)
    if not WRITTEN.fullmatch(text) or (value == 0 and text[0] == "-"):
        return False
    for key, sign in (("minimum", 1), ("maximum", -1)):
        if key in schema and (value - Decimal(repr(schema[key]))) * sign < 0:
            return False
        bound = Decimal(repr(schema.get("exclusiveM" + key[1:], 0)))
        if "exclusiveM" + key[1:] in schema and (value - bound) * sign < exclusive_gap(bound):
            return False
    return "multipleOf" not in schema or value % Decimal(repr(schema["multipleOf"])) == 0


def numbers_at_bounds(rng, n):
    """Schemas of random bounds, each with texts at, just above and just below them."""
    out = []
    for _ in range(n):
        scale = 10.0 ** rng.randrange(-8, 14)
        lo, hi = sorted(round(rng.uniform(-scale, scale), rng.randrange(0, 15)) for _ in range(2))
        if rng.random() < 0.2:
            lo, hi = sorted((0.0, abs(hi)))
        if hi - lo < 1e-12:
            continue
        schema = {"type": "number"}
        if rng.random() < 0.8:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = lo
        if rng.random() < 0.8 or len(schema) == 1:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = hi
        texts = []
        for bound in (lo, hi, (lo + hi) / 2):
            for places in (0, 1, 3, 8, 14, 16):
                step = Decimal(1).scaleb(-places)
                base = Decimal(repr(bound)).quantize(step) if abs(bound) < 1e11 else Decimal(
                    int(bound))
                texts += [f"{base + k * step:f}" for k in (-11, -1, 0, 1, 10)]
        out.append((schema, texts))
    return out


def walk(program, seed, schemas, texts):
    lines = "".join(json.dumps({"schema": json.dumps(s), "texts": t}) + "\n"
                    for s, t in zip(schemas, texts))
    out = subprocess.run([program, str(seed), "8"], input=lines, stdout=subprocess.PIPE, text=True,
                         check=True, timeout=300).stdout.splitlines()
    assert len(out) == len(schemas), f"{len(out)} answers to {len(schemas)} schemas"
    return [json.loads(line) for line in out]


def multiple_of(validator, step, instance, schema):
    if isinstance(instance, (int, Decimal)) and not isinstance(instance, bool) and instance % step:
        yield jsonschema.ValidationError(f"{instance} is no multiple of {step}")


def with_prefix_items(schema):
    """For the check of draft 2020-12, which has no lists of items."""
    if isinstance(schema, list):
        return [with_prefix_items(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: with_prefix_items(v) for k, v in schema.items()}
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items") or [True]
    return out


def items_of(cls):
    """items: a list of schemas, as until draft 2019-09, or one."""
    def items(validator, value, instance, schema):
        older = jsonschema.Draft7Validator.VALIDATORS["items"]
        yield from (older if isinstance(value, list) else cls.VALIDATORS["items"])(
            validator, value, instance, schema) or ()
    return items


class Validators:
    """By doubles, as most readers see a number, and by decimals, as it is written."""

    def __init__(self, schema):
        cls = jsonschema.Draft202012Validator
        cls.check_schema(with_prefix_items(schema))
        checker = jsonschema.FormatChecker(f for f in ("date", "ipv4", "uuid", "time", "date-time")
                                           if f in jsonschema.FormatChecker.checkers)
        whole = cls.TYPE_CHECKER.redefine("integer", lambda _, x: not isinstance(x, bool) and (
            isinstance(x, int) or (isinstance(x, Decimal) and x == int(x))))
        # 2020-12 passes `dependencies` by; what keeps to it is valid by all drafts
        older = {k: jsonschema.Draft7Validator.VALIDATORS[k]
                 for k in ("dependencies", "additionalItems")}
        older["items"] = items_of(cls)
        cls = jsonschema.validators.extend(cls, older)
        exact = jsonschema.validators.extend(cls, {"multipleOf": multiple_of}, type_checker=whole)
        text = json.dumps(schema)
        self.decimal = exact(json.loads(text, parse_float=Decimal), format_checker=checker)
        has_step = '"multipleOf"' in text  # by doubles 0.07 is no multiple of 0.01
        self.double = None if has_step else cls(schema, format_checker=checker)

    def valid(self, text):
        answers = {self.decimal.is_valid(json.loads(text, parse_float=Decimal))}
        if self.double:
            answers.add(self.double.is_valid(json.loads(text)))
        return min(answers)


def check_cases(program, seed, wrong):
    answers = walk(program, seed, [c[1] for c in CASES], [c[2] + c[3] + c[4] for c in CASES])
    n = 0
    for (theme, schema, take, refuse, not_ours), answer in zip(CASES, answers):
        where = f"{theme}: {json.dumps(schema)}"
        if "error" in answer:
            wrong.append(f"{where}: {answer['error']}")
            continue
        validators = Validators(schema)
        n += len(answer["taken"]) + len(answer["outputs"])
        for i, (text, taken) in enumerate(zip(take + refuse + not_ours, answer["taken"])):
            if taken != (i < len(take)):
                wrong.append(f"{where} {'takes' if taken else 'does not take'} {text}")
            try:
                valid = validators.valid(text)
            except ValueError:
                valid = False
            if valid != (not len(take) <= i < len(take) + len(refuse)):
                wrong.append(f"{where}: the validator does not agree about {text}")
        wrong += [f"{where} made {t}" for t in answer["outputs"] if not validators.valid(t)]
    return n


def check_refused(program, seed, wrong):
    answers = walk(program, seed, [r[1] for r in REFUSED], [[] for _ in REFUSED])
    for (theme, schema, words), answer in zip(REFUSED, answers):
        if words not in answer.get("error", ""):
            error = answer.get("error", "taken")
            wrong.append(f'{theme}: {json.dumps(schema)}: "{error}" has no "{words}"')


def check_numbers(program, seed, wrong):
    n = n_rounds(30, 80, 200)
    rows = numbers_at_bounds(random.Random(seed), n)
    answers, n_taken = walk(program, seed, [r[0] for r in rows], [r[1] for r in rows]), 0
    for (schema, texts), answer in zip(rows, answers):
        if "error" in answer:
            wrong.append(f"{schema}: {answer['error']}")
            continue
        validators = Validators(schema)
        for text, taken in zip(texts, answer["taken"]):
            if taken != is_ours(schema, text):
                wrong.append(f"{schema} {'takes' if taken else 'does not take'} {text}")
            if taken and not validators.valid(text):
                wrong.append(f"{schema} takes {text}, which is not valid")
            n_taken += taken
        wrong += [f"{schema} made {t}" for t in answer["outputs"] if not validators.valid(t)]
    return sum(len(t) for _, t in rows), n_taken


def main():
    seed = int(os.environ.get("SEED", "1"))
    for fill in (numbers, strings, values, objects, names, arrays, sets, together, references,
                 conditions, negations, nothing, drafts, refusals):
        fill()
    wrong = []
    n = check_cases(sys.argv[1], seed, wrong)
    check_refused(sys.argv[1], seed, wrong)
    n_texts, n_taken = check_numbers(sys.argv[1], seed, wrong)
    n_wild, n_wild_taken = check_wild(sys.argv[1], seed, wrong)
    n_ruled, n_ruled_taken, n_objects = check_conditions(sys.argv[1], seed, wrong)
    wrong = list(dict.fromkeys(wrong))
    if wrong:
        sys.exit("\n".join(wrong[:40]) + f"\nSEED={seed}: {len(wrong)} are wrong")
    print(f"{len(CASES)} schemas with {n} texts, {len(REFUSED)} refused by name; {n_texts} numbers "
          f"at bounds, of which {n_taken} taken; {n_wild} random schemas, of which {n_wild_taken} "
          f"taken; {n_ruled} of conditions, of which {n_ruled_taken} taken, with {n_objects[0]} "
          f"objects that are not valid and {n_objects[1]} that are")
    assert n_ruled_taken > 0.3 * n_ruled and min(n_objects) > 2 * n_ruled
    assert n_wild_taken > 0.2 * n_wild
    assert 0.1 * n_texts < n_taken < 0.9 * n_texts


if __name__ == "__main__":
    main()
