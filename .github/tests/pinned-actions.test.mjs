// Every action is pinned to a commit, with the release it stands for beside it.
//
//     node --test .github/tests/pinned-actions.test.mjs

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import test from 'node:test';

const folder = new URL('../workflows/', import.meta.url);

for (const file of readdirSync(folder)) {
  test(`${file} pins its actions`, () => {
    const lines = readFileSync(new URL(file, folder), 'utf8').split('\n');
    for (const line of lines.filter((line) => /^\s*(-\s+)?uses:/.test(line))) {
      assert.match(line, /uses: [\w.-]+\/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$/);
    }
  });
}
