import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: ["**/static/**", "build/**", ".venv*/**"] },
  js.configs.recommended,
  {
    files: ["js/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: globals.browser },
    rules: {
      curly: ["error", "multi-line"],
      eqeqeq: "error",
      "no-duplicate-imports": "error",
      "no-implicit-coercion": "error",
      "no-shadow": "error",
      "no-unused-expressions": "error",
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
      "prefer-template": "error",
    },
  },
  {
    files: ["js/*.mjs", "js/tests/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: globals.node },
  },
];
