// Runs the script inside close-organization-fork-prs.yml against a fake of GitHub's API.
//
//     node --test .github/tests/close-organization-fork-prs.test.mjs

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

const workflow = readFileSync(new URL('../workflows/close-organization-fork-prs.yml', import.meta.url), 'utf8');
const MARKER = '<!-- policy: organization-fork -->';

/** The text of the YAML block scalar that follows `key`, without its indentation. */
function blockScalar(yaml, key) {
  const lines = yaml.split('\n');
  const start = lines.findIndex((line) => line.trim() === key);
  assert.notEqual(start, -1, `no "${key}" in the workflow`);
  const indent = (line) => line.length - line.trimStart().length;
  const rest = lines.slice(start + 1);
  const end = rest.findIndex((line) => line.trim() !== '' && indent(line) <= indent(lines[start]));
  const block = end === -1 ? rest : rest.slice(0, end);
  const margin = Math.min(...block.filter((line) => line.trim() !== '').map(indent));
  return block.map((line) => line.slice(margin)).join('\n').trimEnd();
}

const AsyncFunction = (async () => {}).constructor;
const script = new AsyncFunction('github', 'context', 'core', blockScalar(workflow, 'script: |'));
const condition = blockScalar(workflow, 'if: >-');

/** GitHub's expression, as far as this workflow uses it: paths, strings, `==`, `!=` and `&&`. */
function jobRuns(event) {
  const source = condition.replaceAll(/github\.event\.([\w.]+)/g, (_, path) =>
    JSON.stringify(path.split('.').reduce((value, key) => value?.[key], event) ?? null),
  );
  return new Function(`return (${source});`)();
}

const base = { id: 1, owner: { type: 'User' }, html_url: 'https://git.example/us/sd', default_branch: 'main' };
const fork = (type) => ({ id: 2, owner: { type } });
const pullRequest = (head, state = 'open') => ({ number: 7, state, head: { repo: head }, base: { repo: base } });
const comment = (body, login = 'github-actions[bot]') => ({ body, user: login === null ? null : { login } });

/** A repository with one pull request: what the API says now, and what was done to it. */
function fakeGitHub(pr, comments = []) {
  const calls = [];
  const ours = (args) => {
    assert.equal(args.owner, 'us');
    assert.equal(args.repo, 'sd');
    assert.equal(args.pull_number ?? args.issue_number, pr.number);
  };
  const rest = {
    pulls: {
      get: async (args) => {
        ours(args);
        return { data: structuredClone(pr) };
      },
      update: async (args) => {
        ours(args);
        calls.push(`state: ${args.state}`);
        pr.state = args.state;
        return { data: structuredClone(pr) };
      },
    },
    issues: {
      listComments: async ({ page = 1, per_page = 30, ...args }) => {
        ours(args);
        const size = Math.min(per_page, 100);
        return { data: comments.slice((page - 1) * size, page * size) };
      },
      createComment: async (args) => {
        ours(args);
        calls.push('comment');
        comments.push(comment(args.body));
        return { data: comments.at(-1) };
      },
    },
  };
  const paginate = async (method, args) => {
    const all = [];
    for (let page = 1; ; page++) {
      const { data } = await method({ ...args, page });
      all.push(...data);
      if (data.length < Math.min(args.per_page ?? 30, 100)) return all;
    }
  };
  return { rest, paginate, pr, comments, calls };
}

async function run(github) {
  const context = { repo: { owner: 'us', repo: 'sd' }, payload: { pull_request: { number: github.pr.number } } };
  await script(github, context, { info() {} });
  return github.calls;
}

test("an organisation's fork is explained, then closed", async () => {
  const github = fakeGitHub(pullRequest(fork('Organization')));
  assert.deepEqual(await run(github), ['comment', 'state: closed']);
  const [{ body }] = github.comments;
  assert.ok(body.startsWith(`${MARKER}\n\n`));
  assert.match(body, /Allow edits from maintainers/);
  assert.match(body, /https:\/\/git\.example\/us\/sd\/blob\/main\/CONTRIBUTING\.md#pull-requests-from-forks/);
});

test('reopened, it is closed again without a second comment', async () => {
  const github = fakeGitHub(pullRequest(fork('Organization')));
  await run(github);
  github.pr.state = 'open';
  assert.deepEqual(await run(github), ['comment', 'state: closed', 'state: closed']);
  assert.equal(github.comments.length, 1);
});

test('the explanation is found on a later page of comments', async () => {
  const talk = Array.from({ length: 250 }, (_, index) => comment(`remark ${index}`, 'someone'));
  talk[240] = comment(`${MARKER}\n\nexplained`);
  assert.deepEqual(await run(fakeGitHub(pullRequest(fork('Organization')), talk)), ['state: closed']);
});

test('only the bot itself can have explained', async () => {
  const talk = [comment(`${MARKER} not needed`, 'someone'), comment(null), comment(MARKER, null)];
  assert.deepEqual(await run(fakeGitHub(pullRequest(fork('Organization')), talk)), ['comment', 'state: closed']);
});

test('a comment that fails leaves the pull request open', async () => {
  const github = fakeGitHub(pullRequest(fork('Organization')));
  github.rest.issues.createComment = async () => {
    throw new Error('down');
  };
  await assert.rejects(run(github), /down/);
  assert.deepEqual(github.calls, []);
});

for (const [name, pr] of [
  ['a personal fork', pullRequest(fork('User'))],
  ['a branch of this repository', pullRequest(base)],
  ['a branch of this repository, owned by an organisation', pullRequest({ ...base, owner: { type: 'Organization' } })],
  ['a pull request closed meanwhile', pullRequest(fork('Organization'), 'closed')],
  ['a pull request whose fork was deleted', pullRequest(null)],
]) {
  test(`${name} is left alone`, async () => {
    assert.deepEqual(await run(fakeGitHub(pr)), []);
  });
}

test('the comment points to a section that exists', () => {
  const contributing = readFileSync(new URL('../../CONTRIBUTING.md', import.meta.url), 'utf8');
  assert.match(contributing, /^## Pull requests from forks$/m);
});

test('the job starts for forks of organisations only', () => {
  const runs = (head) => jobRuns({ pull_request: pullRequest(head) });
  assert.equal(runs(fork('Organization')), true);
  assert.equal(runs(fork('User')), false);
  assert.equal(runs({ ...base, owner: { type: 'Organization' } }), false);
  assert.equal(runs(null), false);
});

test('the workflow takes no text and no code from the pull request', () => {
  assert.doesNotMatch(workflow, /checkout@|^\s*(-\s+)?run:/m);
  assert.doesNotMatch(blockScalar(workflow, 'script: |'), /\$\{\{/);
  assert.match(workflow, /^permissions: \{\}$/m);
  assert.deepEqual(workflow.match(/^\s+[a-z-]+: (write|read)$/gm).map((line) => line.trim()), ['pull-requests: write']);
});
